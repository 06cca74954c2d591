"""Parts of SparseTensors: slices, rows in any order, what a mask names."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.coordinate_list import CoordinateList, set_places
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.shapes import reshape, to_dense, within
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


@implements(torch.index_select, torch.Tensor.index_select)
def index_select(input: SparseTensor, dim: int, index: Tensor) -> SparseTensor:
    """The slices that `index` (integers) names along a dimension, in its order and as often as it names them."""
    dim = within(dim, input.dim())
    shape = list(input.shape)
    shape[dim] = index.shape[0]
    return CoordinateList.of(input).placed(dim, index, input.shape[dim]).assembled(input.format, shape)


@implements(torch.narrow, torch.Tensor.narrow)
def narrow(input: SparseTensor, dim: int, start: int, length: int) -> SparseTensor:
    """The slices from `start` on."""
    return index_select(input, dim, torch.arange(start, start + length, device=input.device))


@implements(torch.select, torch.Tensor.select)
def select(input: SparseTensor, dim: int, index: int) -> Tensor:
    """One slice, dense."""
    dim = within(dim, input.dim())
    return getitem(input, (slice(None),) * dim + (index,))


@implements(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input: SparseTensor, mask: Tensor) -> SparseTensor:
    """The elements where a dense mask is set, in order, as a sparse vector; its length depends on the data."""
    with sizes_stay_inside():
        flat = reshape(input, input.numel())
    return index_select(flat, 0, set_places(mask.expand(input.shape).flatten()))


@implements(torch.Tensor.__getitem__)
def getitem(input: SparseTensor, index: Any) -> Tensor:
    """Rows and blocks: slices and tensors of integers or bools for a dimension; a number gives a dense slice."""
    indices = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in indices if not isinstance(i, Tensor)]:
        at = [i is Ellipsis for i in indices].index(True)
        indices = (*indices[:at], *[slice(None)] * (input.dim() - len(indices) + 1), *indices[at + 1 :])
    if len(indices) > input.dim():
        raise IndexError(f"{len(indices)} indices for a SparseTensor of {input.dim()} dimensions")
    out = input
    numbers = tuple(dim for dim, each in enumerate(indices) if isinstance(each, int))
    chosen = [(dim, index) for dim, each in enumerate(indices) if (index := _index(each, dim, input)) is not None]
    for number, (dim, each) in enumerate(chosen):
        with nullcontext() if number + 1 == len(chosen) and not numbers else sizes_stay_inside():
            out = index_select(out, dim, each)
    return to_dense(out).squeeze(numbers) if numbers else out


@implements(torch.unbind, torch.Tensor.unbind)
def unbind(input: SparseTensor, dim: int = 0) -> tuple[Tensor, ...]:
    """The slices along a dimension, dense."""
    return to_dense(input).unbind(dim)


@implements(torch.Tensor.__iter__)
def iterate(input: SparseTensor) -> Iterator[Tensor]:
    """The slices along the first dimension, dense."""
    return iter(unbind(input))


def _index(each: Any, dim: int, input: SparseTensor) -> Tensor | None:
    """What index_select takes; None for the whole dimension."""
    extent = input.shape[dim]
    if isinstance(each, slice):
        start, stop, step = each.indices(extent)
        whole = (start, stop, step) == (0, extent, 1)
        return None if whole else torch.arange(start, stop, step, device=input.device)
    if isinstance(each, int):
        if not -extent <= each < extent:
            raise IndexError(f"index {each} is out of bounds for dimension {dim} of size {extent}")
        return torch.arange(each % extent, each % extent + 1, device=input.device)
    if isinstance(each, Tensor) and each.dim() == 1:
        each = each.to(input.device)  # torch takes those of the CPU everywhere
        return set_places(each) if each.dtype == torch.bool else torch.where(each < 0, each + extent, each)
    raise unsupported(f"indexing with {type(each).__name__}", "use to_dense()")
