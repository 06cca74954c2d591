"""Indexes SparseTensors: slices, rows in any order, diagonals, and elements under a mask."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.modules import sizes
from gossamer.runtime.torch_internals import is_fake
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.coordinate_list import CoordinateList, of_rank
from gossamer.sparsity.tensor.densify import densified
from gossamer.sparsity.tensor.entries import set_places
from gossamer.sparsity.tensor.extension import implements
from gossamer.sparsity.tensor.shapes import reshape, to_dense, within
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


@implements(torch.index_select, torch.Tensor.index_select)
def index_select(input: Tensor, dim: int, index: Tensor) -> Any:
    """Returns the slices of a dimension in the order of `index` (integers), which may repeat them. Either may be sparse."""
    index = to_dense(index) if isinstance(index, SparseTensor) else index
    if not isinstance(input, SparseTensor):
        return torch.index_select(input, dim, index)
    if index.dtype not in (torch.int64, torch.int32) or index.dim() > 1:
        raise ArgumentError(f"index_select() takes a vector of int32 or int64, got {index.dtype} {list(index.shape)}")
    dim, index = within(dim, input.dim()), index.reshape(-1)  # a 0-d index is one slice
    shape = list(input.shape)
    shape[dim] = index.shape[0]
    return CoordinateList.of(input).placed(dim, index, input.shape[dim]).assembled(input.format, shape)


@implements(torch.narrow, torch.Tensor.narrow)
def narrow(input: SparseTensor, dim: int, start: int, length: int) -> SparseTensor:
    """Returns `length` slices from `start` on; a negative start counts from the end."""
    dim = within(dim, input.dim())
    start = start + input.shape[dim] if start < 0 else start
    if not sizes.guard_or_true(start + length <= input.shape[dim]):
        raise ArgumentError(f"narrow to {length} slices from {start} on of a dimension of size {input.shape[dim]}")
    return index_select(input, dim, torch.arange(start, start + length, device=input.device))


@implements(torch.select, torch.Tensor.select)
def select(input: SparseTensor, dim: int, index: int) -> Tensor:
    """Returns one slice, dense."""
    dim = within(dim, input.dim())
    return getitem(input, (slice(None),) * dim + (index,))


@implements(torch.masked_select, torch.Tensor.masked_select)
def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """Returns the elements where a mask is set, in order, as a sparse vector. Its length depends on the mask.

    The mask may be sparse. Elements of a dense tensor are dense.
    """
    mask = to_dense(mask) if isinstance(mask, SparseTensor) else mask
    if not isinstance(input, SparseTensor):
        return torch.masked_select(input, mask)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    with sizes_stay_inside():
        flat = input.expand(shape).reshape(-1) if shape != input.shape else reshape(input, input.numel())
    assert isinstance(flat, SparseTensor)
    return index_select(flat, 0, set_places(mask.expand(shape).flatten()))


@implements(torch.diagonal, torch.Tensor.diagonal)
def diagonal_of(input: SparseTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Returns a diagonal of a matrix, dense."""
    if input.dim() != 2 or within(dim1, 2) == within(dim2, 2):
        dense: Tensor = densified(torch.diagonal, (input, offset, dim1, dim2), {})
        return dense
    first, second = within(dim1, 2), within(dim2, 2)
    listed = CoordinateList.of(input)
    length = min(input.shape[first] + min(offset, 0), input.shape[second] - max(offset, 0))
    found = listed.values.new_zeros(max(length, 0))
    if length <= 0:
        return found
    kept = listed.at[second] - listed.at[first] == offset
    place = torch.where(kept, listed.at[first] + min(offset, 0), 0)
    return found.index_add(0, place, listed.values.where(kept, torch.zeros_like(listed.values)))


@implements(torch.linalg.diagonal)
def last_diagonal(A: SparseTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Does `diagonal_of`, by default of the last two dimensions."""
    return diagonal_of(A, offset, dim1, dim2)


@implements(torch.diag, torch.Tensor.diag)
def diag(input: SparseTensor, diagonal: int = 0) -> Tensor:
    """Returns a diagonal of a matrix, dense, or the sparse matrix that has a vector as a diagonal."""
    if input.dim() != 1:
        return diagonal_of(input, diagonal)
    listed = CoordinateList.of(input)
    size = input.shape[0] + abs(diagonal)
    at = listed.at[0] + max(-diagonal, 0), listed.at[0] + max(diagonal, 0)
    return CoordinateList(at, listed.values).assembled(of_rank(input.format, 2), [size, size])


@implements(torch.trace, torch.Tensor.trace)
def trace(input: SparseTensor) -> Tensor:
    """Returns the sum of the diagonal."""
    return diagonal_of(input).sum()


@implements(torch.tril, torch.Tensor.tril)
def tril(input: SparseTensor, diagonal: int = 0) -> SparseTensor:
    """Returns the elements on a diagonal and below it. The others are not stored."""
    return _part_of(input, lambda right: right <= diagonal)


@implements(torch.triu, torch.Tensor.triu)
def triu(input: SparseTensor, diagonal: int = 0) -> SparseTensor:
    """Returns the elements on a diagonal and above it. The others are not stored."""
    return _part_of(input, lambda right: right >= diagonal)


def _part_of(input: SparseTensor, taken: Callable[[Tensor], Tensor]) -> SparseTensor:
    """Returns the elements of matrices that are `taken`, by how far each is right of the main diagonal."""
    if input.dim() < 2:
        raise ArgumentError(f"a triangle needs at least 2 dimensions, got {list(input.shape)}")
    entries = CoordinateList.of(input)
    kept = set_places(taken(entries.at[-1] - entries.at[-2]))
    at = tuple([each.index_select(0, kept) for each in entries.at])
    return CoordinateList(at, entries.values.index_select(0, kept)).assembled(input.format, input.shape)


def fill_diagonal(input: SparseTensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Returns the tensor with one value on its diagonal, such as self-loops of a graph. The diagonal is stored."""
    if input.dim() != 2 or wrap:
        out: Tensor = densified(_fill_dense_diagonal, (input, fill_value, wrap), {})
        return out
    entries = CoordinateList.of(input)
    kept = set_places(entries.at[0] != entries.at[1])
    along = torch.arange(min(input.shape), device=input.device)
    at = tuple([torch.cat([each.index_select(0, kept), along]) for each in entries.at])
    values = torch.cat([entries.values.index_select(0, kept), entries.values.new_full(along.shape, fill_value)])
    return CoordinateList(at, values).assembled(input.format, input.shape)


def _fill_dense_diagonal(input: Tensor, fill_value: float, wrap: bool) -> Tensor:
    return input.clone().fill_diagonal_(fill_value, wrap)


@implements(torch.Tensor.__getitem__)
def getitem(input: Tensor, index: Any) -> Tensor:
    """Returns a sparse part for slices, new dimensions, and one tensor, list or mask. A number gives a dense slice.

    Index tensors for all dimensions give the elements at their coordinates, dense. Other combinations index the dense tensor.
    Index tensors may be sparse. Parts of a dense tensor are dense.
    """
    index = _dense_index(index)
    if not isinstance(input, SparseTensor):
        return input[index]
    indices = _spelled_out(input, index if isinstance(index, tuple) else (index,))
    if indices is None:
        out: Tensor = densified(torch.Tensor.__getitem__, (input, index), {})
        return out
    along = [each for each in indices if each is not None]
    if len(along) > 1 and all(isinstance(each, Tensor) and each.dim() for each in along) and None not in indices:
        return _elements(input, along)
    numbers = [isinstance(each, int) or (isinstance(each, Tensor) and not each.dim()) for each in along]
    chosen = [(dim, found) for dim, each in enumerate(along) if (found := _index(each, dim, input)) is not None]
    part = input
    dense_after = any(numbers) or None in indices
    for number, (dim, each) in enumerate(chosen):
        with nullcontext() if number + 1 == len(chosen) and not dense_after else sizes_stay_inside():
            part = index_select(part, dim, each)
    if any(numbers):
        of_numbers = iter(numbers)
        return to_dense(part)[tuple([None if each is None else 0 if next(of_numbers) else slice(None) for each in indices])]
    if None in indices:
        sizes = iter(part.shape)
        return reshape(part, [1 if each is None else next(sizes) for each in indices])
    return part


@implements(torch.unbind, torch.Tensor.unbind)
def unbind(input: SparseTensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Returns the slices along a dimension, dense."""
    return to_dense(input).unbind(dim)


@implements(torch.Tensor.__iter__)
def iterate(input: SparseTensor) -> Iterator[Tensor]:
    """Iterates over the slices along the first dimension, dense."""
    return iter(unbind(input))


def _dense_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple([_dense_index(each) for each in index])
    return to_dense(index) if isinstance(index, SparseTensor) else index


def _spelled_out(input: SparseTensor, given: tuple[Any, ...]) -> list[Any] | None:
    """Returns an index for each dimension, and None for each new one. Returns None if it must be computed dense."""
    indices = [torch.tensor(each, dtype=None if each else torch.int64) if isinstance(each, list) else each for each in given]
    for each in indices:
        if isinstance(each, bool) or not (each is None or each is Ellipsis or isinstance(each, int | slice | Tensor)):
            return None
        if isinstance(each, Tensor) and each.dim() != 1 and each.dtype in (torch.bool, torch.uint8):
            return None
    taken = sum(each is not None and each is not Ellipsis for each in indices)
    if taken > input.dim():
        raise IndexError(f"too many indices: {taken} for a SparseTensor of {input.dim()} dimensions")
    places = [n for n, each in enumerate(indices) if each is Ellipsis] or [len(indices)]
    whole = [slice(None)] * (input.dim() - taken)
    indices = [*indices[: places[0]], *whole, *(each for each in indices[places[0] :] if each is not Ellipsis)]
    tensors = [each for each in indices if isinstance(each, Tensor) and each.dim()]
    together = len(tensors) == len(indices) == input.dim() and len(tensors) > 1
    if not together and (len(tensors) > 1 or any(each.dim() > 1 for each in tensors)):
        return None
    return indices


def _elements(input: SparseTensor, given: Sequence[Tensor]) -> Tensor:
    """Returns the elements at the coordinates in index tensors, one tensor for each dimension, broadcast to one shape."""
    found: list[Any] = [_index(each, dim, input) for dim, each in enumerate(given)]
    each_shape = [each.shape if each.dtype != torch.bool else at.shape for each, at in zip(given, found, strict=True)]
    together = torch.broadcast_tensors(*(at.view(shape) for at, shape in zip(found, each_shape, strict=True)))
    first, *others = (at.flatten() for at in together)
    # index_select refuses coordinates that are out of bounds.
    others = [
        torch.arange(extent, device=at.device).index_select(0, at) for at, extent in zip(others, input.shape[1:], strict=True)
    ]
    rows = CoordinateList.of(input).placed(0, first, input.shape[0])
    there = torch.ones_like(rows.at[0], dtype=torch.bool)
    for crd, at in zip(rows.at[1:], others, strict=True):
        there = there & (crd == at.index_select(0, rows.at[0]))
    values = torch.where(there, rows.values, rows.values.new_zeros(()))  # in its dtype: 0 would turn bools into integers
    return values.new_zeros(first.numel()).index_add(0, rows.at[0], values).view(together[0].shape)


def _index(each: Any, dim: int, input: SparseTensor) -> Tensor | None:
    """Returns the index for index_select, None for the whole dimension."""
    extent = input.shape[dim]
    if isinstance(each, slice) and torch.compiler.is_compiling():
        to_the_end = each.stop is None or sizes.known_true(each.stop >= extent)
        whole = each.start in (None, 0) and to_the_end and each.step in (None, 1)
        return None if whole else torch.arange(extent, device=input.device)[each]  # it does not read an open extent
    if isinstance(each, slice):
        start, stop, step = each.indices(extent)
        if step <= 0:
            raise ValueError("step must be greater than zero")
        whole = (start, stop, step) == (0, extent, 1)
        return None if whole else torch.arange(start, max(start, stop), step, device=input.device)
    if isinstance(each, int):
        if not (
            sizes.guard_or_true(each >= -extent) and sizes.guard_or_true(each < extent)
        ):  # otherwise the graph checks it at run time
            raise IndexError(f"index {each} is out of bounds for dimension {dim} of size {extent}")
        start = each + extent if each < 0 else each
        return torch.arange(start, start + 1, device=input.device)
    each = each.to(input.device).flatten()  # torch accepts index tensors of the CPU for all devices
    if each.dtype in (torch.bool, torch.uint8):
        if each.shape[0] != extent:
            raise IndexError(f"the mask [{each.shape[0]}] does not match dimension {dim} of size {extent}")
        return set_places(each.bool())
    if each.is_floating_point() or each.is_complex():
        raise IndexError(f"tensors used as indices must be integers or bools, got {each.dtype}")
    known = not (torch.compiler.is_compiling() or each.is_meta or is_fake(each))
    if known and bool((each < -extent).any()):  # adding the extent would make it a valid one
        raise IndexError(f"index {int(each.min())} is out of bounds for dimension {dim} of size {extent}")
    return torch.where(each < 0, each + extent, each)
