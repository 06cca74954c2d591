"""Broadcasts SparseTensors to one shape by repeating their entries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.modules import sizes as known_sizes
from gossamer.sparsity.operations.open_sizes import agree, is_one
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.extension import implements
from gossamer.sparsity.tensor.shapes import as_list, reshape
from gossamer.sparsity.tensor.slices import index_select
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


@implements(torch.Tensor.expand, torch.broadcast_to, torch.Tensor.broadcast_to)
def expand(input: SparseTensor, *given: Any, size: Sequence[int] | None = None, implicit: bool = False) -> SparseTensor:
    """Repeats the entries along new dimensions, and along those of size 1 that become larger; -1 keeps a size."""
    sizes = as_list(given) if size is None else list(size)
    new = len(sizes) - input.dim()
    before = [1] * new + list(input.shape)
    shape = [extent if _keeps(wanted) else wanted for extent, wanted in zip(before, sizes, strict=False)]
    pairs = list(zip(before, shape, strict=False))  # of different lengths if `new` is negative
    larger = [n for n, (extent, wanted) in enumerate(pairs) if is_one(extent) and not is_one(wanted)]
    if new < 0 or not all(n in larger or agree(*pair) for n, pair in enumerate(pairs)):
        raise ArgumentError(f"a SparseTensor {list(input.shape)} does not expand to {sizes}: only sizes of 1 may change")
    with sizes_stay_inside():
        out = reshape(input, before) if new else input
        for dim in larger:
            out = index_select(out, dim, torch.zeros(shape[dim], dtype=torch.int64, device=input.device))
    return out


@implements(torch.Tensor.expand_as)
def expand_as(input: Tensor, other: Tensor) -> Tensor:
    """Does `expand` to the shape of another tensor. Either may be sparse."""
    return input.expand(other.shape)


def broadcast(name: str, *tensors: SparseTensor, beside: Sequence[Tensor] = ()) -> list[SparseTensor]:
    """Returns the tensors, broadcast with each other and with the tensors `beside` them."""
    shapes = [tuple(tensor.shape) for tensor in (*tensors, *beside)]
    if all(_known_equal(shape, shapes[0]) for shape in shapes[1:]):
        return list(tensors)
    try:
        shape = torch.broadcast_shapes(*shapes)
    except RuntimeError as problem:
        given = " and ".join(str(list(shape)) for shape in shapes)
        raise ArgumentError(f"{name} of {given}, which do not broadcast") from problem
    return [expand(tensor, *shape) for tensor in tensors]


def _keeps(size: Any) -> bool:
    """Whether a size is -1, which keeps the size of the tensor. Symbolic sizes are not."""
    return isinstance(size, int) and size == -1


def _known_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(known_sizes.known_true(a == b) for a, b in zip(one, other, strict=True))
