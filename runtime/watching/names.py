"""The names of parameters and buffers, for what calls are called in profiles. No tensor is kept alive, or renamed in copies."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

_names: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, str]] = weakref.WeakKeyDictionary()


def name_tensors(named: Iterable[tuple[Tensor, str]]) -> None:
    """Remembers the names of tensors that have memory. The last name of a tensor counts."""
    for tensor, name in named:
        if (address := _address(tensor)) is not None:
            _names.setdefault(tensor.untyped_storage(), {})[address] = name


def name_of(tensor: Tensor) -> str | None:
    """The name of the tensor whose values begin where those of this one do; None if nobody has named it."""
    address = _address(tensor)
    return None if address is None else _names.get(tensor.untyped_storage(), {}).get(address)


def _address(tensor: Tensor) -> int | None:
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.data_ptr() or None
    except RuntimeError:  # torch.func wraps it
        return None
