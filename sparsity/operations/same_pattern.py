"""Compares the patterns of SparseTensors: now, or when a graph runs, because traced arrays have no contents.

gossamer::of_pattern(values, arrays, pattern) -> Tensor     a copy of the values; PatternError if the arrays are not the pattern
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.operations import Operation
from gossamer.runtime.torch_internals import FakeTensor, FunctionalTensor
from gossamer.sparsity.operations.optimizer_calls import in_step


class PatternError(GossamerError):
    """The result of an operator does not follow from the stored values alone."""


def traced(arrays: Sequence[Tensor]) -> bool:
    """Whether some arrays are fake, without contents."""
    return any(isinstance(each, FakeTensor | FunctionalTensor) for each in arrays)


def share_pattern(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether positions and coordinates are equal. For traced arrays: whether they may be, as their sizes become guards."""
    if len(one) != len(other):
        return False
    if traced(one):
        for a, b in zip(one, other, strict=True):
            torch._check(a.shape == b.shape)
        return True
    return all(map(_equal, one, other))


def values_on(pattern: Sequence[Tensor], arrays: Sequence[Tensor], values: Tensor) -> Tensor:
    """Returns the values of a tensor whose arrays share a pattern. A graph compares the arrays when it runs.

    It does not in the step of an optimizer, where parameters, gradients and states share their pattern.
    """
    if not traced(arrays) or all(a is b for a, b in zip(arrays, pattern, strict=True)) or in_step():
        return values
    checked: Tensor = _of_pattern(values, list(arrays), list(pattern))
    return checked


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and (one.data_ptr() == other.data_ptr() or torch.equal(one, other)))


def _check(values: Tensor, arrays: list[Tensor], pattern: list[Tensor]) -> Tensor:
    if not all(map(_equal, arrays, pattern)):
        raise PatternError(
            "two SparseTensors in a graph have different patterns, but their stored values are combined or copied in place, "
            "or one is the gradient of the other: use the same without the underscore, which gives a union or intersection"
        )
    return values.clone()


def _fake(values: Tensor, arrays: list[Tensor], pattern: list[Tensor]) -> Tensor:
    return torch.empty_like(values)


_of_pattern = Operation(
    "of_pattern(Tensor values, Tensor[] arrays, Tensor[] pattern) -> Tensor", _check, _check, _fake
).register()
