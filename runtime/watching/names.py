"""Remembers the names of parameters and buffers, to name calls in profiles. Keeps no tensor alive; copies have no name."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

_names: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, str]] = weakref.WeakKeyDictionary()


def name_tensors(named: Iterable[tuple[Tensor, str]]) -> None:
    """Remembers the names of tensors that have memory. If a tensor gets several names, the last one counts."""
    for tensor, name in named:
        if (address := _address(tensor)) is not None:
            _names.setdefault(tensor.untyped_storage(), {})[address] = name


def name_of(tensor: Tensor) -> str | None:
    """Returns the name of the tensor that begins at the same address of the same storage; None if it has no name."""
    address = _address(tensor)
    return None if address is None else _names.get(tensor.untyped_storage(), {}).get(address)


def _address(tensor: Tensor) -> int | None:
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.data_ptr() or None
    except RuntimeError:  # a wrapper of torch.func
        return None
