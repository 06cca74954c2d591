"""The state of an optimizer for a masked parameter. It holds vectors of the kept entries until somebody reads it.

state["exp_avg"]    →    a dense tensor, as in torch; the next step starts from it

Steps read and write vectors of the kept entries. Code that reads the dictionary, copies it or saves it gets dense tensors.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.torch_internals import storage_references, tensor_references
from gossamer.sparsity.compiler.kept_entries import KeptEntries


class KeptState(dict[str, Any]):
    """The entry of one parameter in the state of an optimizer.

    While a vector is newer than its dense tensor, the dictionary itself has the old tensor, or None if there is none yet.
    Code that makes another dictionary by the type of this one, as from pairs, gets a plain one.
    """

    __slots__ = ("_kept", "_shape", "_vectors")

    def __new__(cls, known: Any = (), *of_kept: Any, **more: Any) -> Any:
        return super().__new__(cls) if of_kept else dict(known, **more)

    def __init__(self, known: dict[str, Any], kept: KeptEntries, shape: torch.Size) -> None:
        super().__init__(known)
        self._kept, self._shape, self._vectors = kept, shape, dict[str, Tensor]()

    def taken(self, kept: KeptEntries) -> dict[str, Any]:
        """Returns the state for a step on the vector of some kept entries."""
        if kept is not self._kept:
            self._settle()
            self._kept = kept
        found = dict[str, Any]()
        for key, value in super().items():
            dense = isinstance(value, Tensor) and value.shape == self._shape
            found[key] = self._vectors.get(key, kept.collected(value) if dense and key not in self._vectors else value)
        return found

    def take_over(self, state: dict[str, Any]) -> None:
        """Takes over the state after a step. Dense tensors that others also reference are written at once."""
        self._vectors = {}
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != self._kept.coordinates.shape:
                super().__setitem__(key, value)
            elif super().setdefault(key, None) is not None and _references(self, key) != _alone():
                self._kept.put(value, super().__getitem__(key))
            else:
                self._vectors[key] = value

    @property
    def is_ahead(self) -> bool:
        """Whether vectors are newer than dense tensors."""
        return bool(self._vectors)

    def _settle(self) -> None:
        """Brings the dense tensors up to date; the next step begins from them."""
        with torch.inference_mode(False), torch.no_grad():
            while self._vectors:
                key, vector = self._vectors.popitem()
                dense = super().get(key)
                if dense is None:
                    dense = vector.new_zeros(self._shape)
                    super().__setitem__(key, dense)
                self._kept.put(vector, dense)

    def __iter__(self) -> Iterator[str]:  # an own __iter__ makes dict(state) read items through __getitem__
        return super().__iter__()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return dict(self)


def _settling(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: KeptState, *given: Any, **named: Any) -> Any:
        self._settle()
        return plain(self, *given, **named)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "get", "items",
    "values", "pop", "popitem", "setdefault", "update", "clear",
):  # fmt: skip
    setattr(KeptState, _name, _settling(_name))


def _references(state: dict[Any, Any], key: Any) -> tuple[int, ...]:
    """Returns the numbers of references to a tensor of a dictionary: from Python, from C++, and to its memory."""
    tensor = dict.__getitem__(state, key)
    return sys.getrefcount(tensor), tensor_references(tensor), storage_references(tensor.untyped_storage()._cdata)


@cache
def _alone() -> tuple[int, ...]:
    """Returns these numbers for a tensor that only the dictionary references."""
    return _references({0: torch.empty(1)}, 0)
