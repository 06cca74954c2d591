"""Reduces SparseTensors to dense tensors. All elements count, also those that are not stored."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from math import prod as product_of
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.torch_internals import sparse_sum
from gossamer.sparsity.operations.open_sizes import is_zero
from gossamer.sparsity.operations.segments import segment_reduce
from gossamer.sparsity.tensor.arithmetic import maximum, minimum
from gossamer.sparsity.tensor.densify import densified
from gossamer.sparsity.tensor.einsum import einsum
from gossamer.sparsity.tensor.entries import letters_of
from gossamer.sparsity.tensor.extension import implements
from gossamer.sparsity.tensor.fibres import all_fibres
from gossamer.sparsity.tensor.shapes import within
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, like, values_of

Dims = int | Sequence[int] | None


@implements(torch.sum, torch.Tensor.sum, sparse_sum)
def sum_(input: SparseTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns dense sums over all or some dimensions, in int64 for integers unless `dtype` says otherwise."""
    input, dims = _in(input, dtype), _dims(input, dim)
    letters = letters_of(input)
    out = einsum(f"{letters}->{''.join(c for n, c in enumerate(letters) if n not in dims)}", input, format="dense")
    out = out if dtype is None else out.to(dtype)  # einsum sums integers in int64
    return _restored(out, dims) if keepdim else out


@implements(torch.mean, torch.Tensor.mean)
def mean(input: SparseTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns dense means over all or some dimensions."""
    if not (dtype or input.dtype).is_floating_point and not (dtype or input.dtype).is_complex:
        raise RuntimeError(f"mean(): the result must be floating point or complex, not {dtype or input.dtype}: give a dtype")
    wanted = dtype or input.dtype
    total = sum_(input, dim, keepdim, dtype=torch.promote_types(wanted, torch.float32))  # a sum may exceed the range of float16
    return (total / product_of(input.shape[each] for each in _dims(input, dim))).to(wanted)


@implements(torch.amax, torch.Tensor.amax)
def amax(input: SparseTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns the largest elements over all or some dimensions."""
    return _reduced(input, "amax", dim, keepdim)


@implements(torch.amin, torch.Tensor.amin)
def amin(input: SparseTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns the smallest elements over all or some dimensions."""
    return _reduced(input, "amin", dim, keepdim)


@implements(torch.prod, torch.Tensor.prod)
def prod(input: SparseTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns products over all or some dimensions, in int64 for integers."""
    return _reduced(_in(input, dtype), "prod", dim, keepdim)


@implements(torch.max, torch.Tensor.max)
def max_(input: SparseTensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the largest element, or `maximum` of two tensors. With a dimension it runs dense, as it also returns indices."""
    return _extreme(torch.max, amax, maximum, input, args, kwargs)


@implements(torch.min, torch.Tensor.min)
def min_(input: SparseTensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the smallest element, or `minimum` of two tensors. With a dimension it runs dense, as it also returns indices."""
    return _extreme(torch.min, amin, minimum, input, args, kwargs)


@implements(torch.norm, torch.Tensor.norm, torch.linalg.vector_norm)
def norm(
    input: SparseTensor,
    p: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    ord: Any = None,
) -> Tensor:
    """Returns the p-norm over all or some dimensions. Other p than positive ones are computed on all elements.

    Of the gradient of a weight that is dealt to processes, it is the norm of all parts.
    """
    p = ord if ord is not None else 2 if p in (None, "fro") else p
    own = _norm(input, p, dim, keepdim, dtype)
    dealt = None if own.requires_grad or dim is not None else input._dealt
    return dealt.whole_norm(own, p) if dealt is not None and dealt.gradient else own


def _norm(input: SparseTensor, p: Any, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    if isinstance(p, str) or p <= 0:
        out: Tensor = densified(torch.norm, (input, p, dim, keepdim), {"dtype": dtype})
        return out
    dims, wanted = _dims(input, dim), dtype or input.dtype
    wide = torch.promote_types(wanted, torch.float32) if wanted.is_floating_point else wanted
    values = values_of(input).to(wide)
    size = values.abs()
    if p == inf:
        return amax(like(input, size), dims, keepdim).to(size.dtype if wanted.is_complex else wanted)
    if p == 2 and not values.is_complex():
        powers = values.square()  # at a stored zero, abs() has no second derivative
    else:
        powers = size**p if p >= 1 else torch.where(size == 0, 0, torch.where(size == 0, 1, size) ** p)  # as the root below
    total = sum_(like(input, powers), dims, keepdim)
    nothing = total == 0  # the root has no derivative at 0
    return torch.where(nothing, 0, torch.where(nothing, 1, total) ** (1 / p)).to(total.dtype if wanted.is_complex else wanted)


@implements(torch.linalg.norm)
def linalg_norm(
    input: SparseTensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns `norm`. Norms of matrices are computed on all elements."""
    if ord is None or (input.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)) == 1:
        return norm(input, ord, dim, keepdim, dtype)
    out: Tensor = densified(torch.linalg.norm, (input, ord, dim, keepdim), {"dtype": dtype})
    return out


@implements(torch.any, torch.Tensor.any)
def any_(input: SparseTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns whether some element is not zero. For dim=() it returns which elements are not zero, as torch does."""
    if _no_dimensions(dim):
        return _each_truth(input)
    return _as_truth(input, _nonzeros(input, dim, keepdim) > 0)


@implements(torch.all, torch.Tensor.all)
def all_(input: SparseTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Returns whether no element is zero. For dim=() it returns which elements are not zero, as torch does."""
    if _no_dimensions(dim):
        return _each_truth(input)
    whole = product_of(input.shape[each] for each in _dims(input, dim))
    return _as_truth(input, _nonzeros(input, dim, keepdim) == whole)


@implements(torch.count_nonzero, torch.Tensor.count_nonzero)
def count_nonzero(input: SparseTensor, dim: Dims = None) -> Tensor:
    """Returns how many elements are not zero."""
    return _nonzeros(input, dim, False)


def _nonzeros(input: SparseTensor, dim: Dims, keepdim: bool) -> Tensor:
    return sum_(like(input, values_of(input).detach() != 0), dim, keepdim)


def _each_truth(input: SparseTensor) -> Tensor:
    return _as_truth(input, like(input, values_of(input).detach() != 0))


def _no_dimensions(dim: Dims) -> bool:
    return isinstance(dim, Sequence) and not dim


def _as_truth(input: SparseTensor, truth: Tensor) -> Tensor:
    return truth.to(torch.uint8) if input.dtype == torch.uint8 else truth  # as torch does


def _extreme(function: Any, whole: Any, elementwise: Any, input: SparseTensor, args: Any, kwargs: Any) -> Any:
    if not args and not kwargs:
        if not input.numel():
            raise RuntimeError(f"{function.__name__}() of a tensor without elements: there is no {function.__name__}imum")
        return whole(input)
    other = args[0] if args else kwargs.get("other")
    return elementwise(input, other) if isinstance(other, Tensor) else densified(function, (input, *args), kwargs)


def _reduced(input: SparseTensor, kind: str, dim: Dims, keepdim: bool) -> Tensor:
    if input.dtype in (torch.bool, torch.uint8):
        return _reduced(like(input, values_of(input).to(torch.int16)), kind, dim, keepdim).to(input.dtype)
    if input.dtype.is_complex:
        out: Tensor = densified(getattr(torch, kind), (input,), {} if dim is None else {"dim": dim, "keepdim": keepdim})
        return out
    dims = _dims(input, dim)
    over = dims if dim is not None else range(input.dim())
    if kind != "prod" and any(is_zero(input.shape[each]) for each in over):
        raise IndexError(f"{kind}() over no elements of a tensor {list(input.shape)}: reduce dimensions that have some")
    extent = product_of(input.shape[each] for each in dims)
    fibres = all_fibres(input, dims)
    out = segment_reduce(fibres.positions, fibres.values, kind, extent)
    kept = [1 if n in dims else size for n, size in enumerate(input.shape)]
    return out.view(kept if keepdim else [size for n, size in enumerate(input.shape) if n not in dims])


def _in(input: SparseTensor, dtype: torch.dtype | None) -> SparseTensor:
    """Returns the tensor in the dtype of a sum or product."""
    dtype = dtype or (input.dtype if input.dtype.is_floating_point or input.dtype.is_complex else torch.int64)
    return input if dtype == input.dtype else like(input, values_of(input).to(dtype))


def _dims(tensor: Tensor, dim: Dims) -> list[int]:
    given = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = sorted(within(each, tensor.dim()) for each in given) or list(range(tensor.dim()))
    twice = next((dim for dim, after in pairwise(dims) if dim == after), None)
    if twice is not None:
        raise RuntimeError(f"dim {twice} appears multiple times in the list of dims")
    return dims


def _restored(out: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        out = out.unsqueeze(dim)
    return out
