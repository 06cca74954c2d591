"""Functions of torch that transpose and reshape SparseTensors, or make them dense."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.operations.open_sizes import divisor
from gossamer.sparsity.tensor.coordinate_list import CoordinateList, of_rank
from gossamer.sparsity.tensor.einsum import einsum, transposed
from gossamer.sparsity.tensor.entries import letters_of
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, like, values_of


@implements(torch.Tensor.to_dense)
def to_dense(input: SparseTensor, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None) -> Tensor:
    """Returns the dense tensor."""
    letters = letters_of(input)
    out = einsum(f"{letters}->{letters}", input, format="dense")
    return out if dtype is None else out.to(dtype)


@implements(torch.Tensor.coalesce)
def coalesce(input: SparseTensor) -> SparseTensor:
    """Returns the tensor itself, because duplicates are summed when it is made."""
    return input


@implements(torch.Tensor.T.__get__)  # type: ignore[attr-defined]
def reversed_dimensions(input: SparseTensor) -> SparseTensor:
    """Returns the transpose: the same arrays in the permuted format."""
    return transposed(input, range(input.dim() - 1, -1, -1))


@implements(torch.t, torch.Tensor.t)
def t(input: SparseTensor) -> SparseTensor:
    """Returns the transpose of a matrix, or a vector itself."""
    if input.dim() > 2:
        raise ArgumentError(f"t() takes matrices and vectors, got {input.dim()} dimensions: see permute")
    return reversed_dimensions(input)


@implements(torch.transpose, torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes, torch.swapdims,
            torch.Tensor.swapdims)  # fmt: skip
def transpose(input: SparseTensor, dim0: int, dim1: int) -> SparseTensor:
    """Exchanges two dimensions without a copy."""
    order = list(range(input.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return transposed(input, order)


@implements(torch.permute, torch.Tensor.permute)
def permute(input: SparseTensor, *order: Any, dims: Sequence[int] | None = None) -> SparseTensor:
    """Puts the dimensions in another order without a copy."""
    wanted = as_list(order if dims is None else (dims,))
    if sorted(within(dim, input.dim()) for dim in wanted) != list(range(input.dim())):
        raise ArgumentError(f"permute of {input.dim()} dimensions takes each of them once, got {wanted}")
    return transposed(input, wanted)


@implements(torch.movedim, torch.Tensor.movedim, torch.moveaxis, torch.Tensor.moveaxis)
def movedim(input: SparseTensor, source: int | Sequence[int], destination: int | Sequence[int]) -> SparseTensor:
    """Moves dimensions to other places without a copy; the others keep their order."""
    given = ([each] if isinstance(each, int) else each for each in (source, destination))
    moved, places = ([within(dim, input.dim()) for dim in dims] for dims in given)
    if not len(set(moved)) == len(set(places)) == len(moved) == len(places):
        raise ArgumentError(f"movedim from {source} to {destination}: both name equally many dimensions, each once")
    order = [dim for dim in range(input.dim()) if dim not in moved]
    for place, dim in sorted(zip(places, moved, strict=True)):
        order.insert(place, dim)
    return transposed(input, order)


@implements(torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def m_t(input: SparseTensor) -> SparseTensor:
    """Exchanges the last two dimensions."""
    if input.dim() < 2:
        raise ArgumentError(f"a SparseTensor {list(input.shape)} has no last two dimensions to exchange: see T")
    return transpose(input, -2, -1)


@implements(torch.adjoint, torch.Tensor.adjoint, torch.Tensor.mH.__get__, torch.Tensor.H.__get__)  # type: ignore[attr-defined]
def adjoint(input: SparseTensor) -> SparseTensor:
    """Exchanges the last two dimensions, and conjugates complex numbers."""
    turned = m_t(input)
    return like(turned, values_of(turned).conj().resolve_conj()) if input.is_complex() else turned


@implements(torch.reshape, torch.Tensor.reshape, torch.Tensor.view)
def reshape(input: SparseTensor, *given: Any, shape: Sequence[int] | None = None) -> SparseTensor:
    """Returns the entries in another shape; one size may be -1. COO stays COO, other formats become CSR or CSF if necessary.

    A result without dimensions is dense.
    """
    if given and isinstance(given[0], torch.dtype):
        raise unsupported("view as another dtype", "use to(), which converts the values")
    wanted = as_list(given) if shape is None else list(shape)
    sizes, count = list(wanted), prod(input.shape)
    if -1 in sizes:
        known = -prod(sizes)
        sizes[sizes.index(-1)] = count // known if known else 0
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise ArgumentError(f"a SparseTensor {list(input.shape)} has no shape {wanted}: one size may be -1, none less")
    if not sizes and count == 1:
        scalar: Any = to_dense(input).reshape(())
        return scalar
    if not sizes or prod(sizes) != count:
        raise ArgumentError(f"a SparseTensor {list(input.shape)} has no shape {wanted}: it has {count} elements")
    if sizes == list(input.shape):
        return input
    listed = CoordinateList.of(input)
    linear = torch.zeros_like(listed.at[0])
    for crd, extent in zip(listed.at, input.shape, strict=True):
        linear = linear * extent + crd
    at: list[Tensor] = []
    for extent in reversed(sizes):
        at.insert(0, linear % divisor(extent))
        linear = linear // divisor(extent)
    return CoordinateList(tuple(at), listed.values).assembled(of_rank(input.format, len(sizes)), sizes)


@implements(torch.Tensor.reshape_as, torch.Tensor.view_as)
def reshape_as(input: Tensor, other: Tensor) -> Tensor:
    """Does `reshape` to the shape of another tensor. Either may be sparse.

    `x.view_as(x)` is another tensor, because autograd finds the node of a leaf above it.
    """
    if input is other:
        with torch.DisableTorchFunctionSubclass():
            same: Tensor = torch.ops.aten.alias(input)
        return same
    return reshape(input, *other.shape) if isinstance(input, SparseTensor) else input.reshape(other.shape)


@implements(torch.flatten, torch.Tensor.flatten, torch.ravel, torch.Tensor.ravel)
def flatten(input: SparseTensor, start_dim: int = 0, end_dim: int = -1) -> SparseTensor:
    """Joins consecutive dimensions to one."""
    start, end = within(start_dim, input.dim()), within(end_dim, input.dim())
    return reshape(input, *input.shape[:start], prod(input.shape[start : end + 1]), *input.shape[end + 1 :])


@implements(torch.unflatten, torch.Tensor.unflatten)
def unflatten(input: SparseTensor, dim: int, sizes: Sequence[int]) -> SparseTensor:
    """Splits one dimension into several; one size may be -1."""
    dim, inner = within(dim, input.dim()), list(sizes)
    if -1 in inner:
        inner[inner.index(-1)] = input.shape[dim] // max(-prod(inner), 1)
    return reshape(input, *input.shape[:dim], *inner, *input.shape[dim + 1 :])


@implements(torch.unsqueeze, torch.Tensor.unsqueeze)
def unsqueeze(input: SparseTensor, dim: int) -> SparseTensor:
    """Inserts a dimension of size 1."""
    dim = within(dim, input.dim() + 1)
    return reshape(input, *input.shape[:dim], 1, *input.shape[dim:])


@implements(torch.squeeze, torch.Tensor.squeeze)
def squeeze(input: SparseTensor, dim: int | Sequence[int] | None = None) -> SparseTensor:
    """Removes all dimensions of size 1, or those in `dim`. The result is dense if no dimension is left."""
    named = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {within(each, input.dim()) for each in named}
    shape = [extent for n, extent in enumerate(input.shape) if n not in gone or extent != 1]
    return reshape(input, shape)


def within(dim: int, rank: int) -> int:
    """Returns a dimension counted from the front. IndexError if it is out of range."""
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} is out of range for a SparseTensor of {rank} dimensions")
    return dim % rank


def as_list(sizes: Sequence[Any]) -> list[int]:
    """Returns numbers that were given one by one or as one sequence."""
    return list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int | torch.SymInt | Tensor) else list(sizes)
