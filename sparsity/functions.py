"""What torch's functions do with a SparseTensor. Those not listed here go to aten's operators, see pointwise.py."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.sparsity.dense_results import sample
from gossamer.sparsity.einsum import einsum, transposed
from gossamer.sparsity.entries import coordinates
from gossamer.sparsity.operands import dense as bound_dense
from gossamer.sparsity.sparse_results import add_sparse, in_format
from gossamer.sparsity.tensor import SparseTensor, bound_to, from_entries, like, made_of, values_of

Function = Callable[..., Any]

# f(0) = 0: the result has the pattern of the operand.
_ZERO_PRESERVING = (
    "abs", "asin", "asinh", "atan", "atanh", "ceil", "deg2rad", "erf", "erfinv", "expm1", "floor", "frac", "log1p", "neg",
    "nan_to_num", "positive", "rad2deg", "relu", "round", "sgn", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
    "trunc",
)  # fmt: skip


def _implements(*names: Function) -> Callable[[Function], Function]:
    """Registers a function as what these functions of torch do if an argument is a SparseTensor."""

    def register(function: Function) -> Function:
        SparseTensor.functions.update(dict.fromkeys(names, function))
        return function

    return register


# Products


@_implements(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.mv, torch.Tensor.mv,
             torch.bmm, torch.Tensor.bmm, torch.sparse.mm, torch.dot, torch.Tensor.dot)  # fmt: skip
def matmul(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of up to three dimensions, one or both sparse; two sparse matrices give a sparse one."""
    left, right = _autocast(left, right)
    spelled = {(1, 1): "k,k->", (2, 1): "ik,k->i", (1, 2): "k,kj->j", (2, 2): "ik,kj->ij", (3, 3): "bik,bkj->bij",
               (3, 2): "bik,kj->bij", (2, 3): "ik,bkj->bij", (3, 1): "bik,k->bi"}  # fmt: skip
    ranks = left.dim(), right.dim()
    if ranks in spelled:
        return einsum(spelled[ranks], left, right)
    if ranks[1] == 2 and ranks[0] > 3 and not isinstance(left, SparseTensor):
        return einsum("ik,kj->ij", left.flatten(0, -2), right).unflatten(0, left.shape[:-1])
    raise _unsupported(f"matmul of {ranks[0]} and {ranks[1]} dimensions", "use gossamer.einsum")


@_implements(torch.Tensor.__rmatmul__)
def rmatmul(right: Tensor, left: Tensor) -> Tensor:
    """left @ right"""
    return matmul(left, right)


@_implements(torch.addmm, torch.Tensor.addmm, torch.sparse.addmm)
def addmm(addend: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * addend + alpha * (left @ right)"""
    return _plus(addend, beta, matmul(left, right), alpha)


@_implements(torch.addmv, torch.Tensor.addmv)
def addmv(addend: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * addend + alpha * (matrix @ vector)"""
    return _plus(addend, beta, matmul(matrix, vector), alpha)


@_implements(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, with a sparse weight, a sparse input, or both"""
    input, weight = _autocast(input, weight)
    rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    out = einsum("tk,mk->tm", rows, weight, format="dense")
    out = out if bias is None else out + bias.to(out.dtype)
    return out if input.dim() == 2 else out.reshape(*input.shape[:-1], weight.shape[0])


@_implements(torch.sparse.sampled_addmm)
def sampled_addmm(pattern: SparseTensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> SparseTensor:
    """beta * pattern + alpha * (left @ right), at the entries of the pattern (SDDMM)"""
    matrix = bound_to("ij", pattern)
    sampled = sample(matrix, [bound_dense("ik", left), bound_dense("kj", right)])
    return like(pattern, beta * matrix.values + alpha * sampled)


# Sums


@_implements(torch.sum, torch.Tensor.sum, torch.sparse.sum)
def sum_(
    input: SparseTensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Dense sums over all or some dimensions."""
    if dtype is not None and dtype != input.dtype:
        input = like(input, values_of(input).to(dtype))
    dims = _dims(input, dim)
    letters = _letters(input)
    out = einsum(f"{letters}->{''.join(c for n, c in enumerate(letters) if n not in dims)}", input, format="dense")
    return _restored(out, dims) if keepdim else out


@_implements(torch.mean, torch.Tensor.mean)
def mean(
    input: SparseTensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Dense means over all or some dimensions, zeros counted."""
    count = 1
    for each in _dims(input, dim):
        count *= input.shape[each]
    return sum_(input, dim, keepdim, dtype=dtype) / count


# Elementwise


@_implements(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.multiply, torch.Tensor.multiply)
def mul(left: Any, right: Any) -> Tensor:
    """Sparse times a number, a dense tensor (broadcast; the result has the sparse pattern), or sparse (their intersection)."""
    if not isinstance(left, SparseTensor):
        left, right = right, left
    if not isinstance(right, Tensor) or right.dim() == 0:
        return like(left, values_of(left) * right)
    if isinstance(right, SparseTensor):
        _same_shape("mul", left, right)
        if _same_pattern(left, right):
            return like(left, values_of(left) * values_of(right))
        letters = _letters(left)
        return einsum(f"{letters},{letters}->{letters}", left, right)
    return like(left, values_of(left) * _at_entries(left, right))


@_implements(torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.true_divide, torch.Tensor.true_divide)
def div(left: Any, right: Any) -> Tensor:
    """Sparse divided by a number or a dense tensor (broadcast); zeros stay zeros, even where the divisor is 0."""
    if isinstance(right, SparseTensor) or not isinstance(left, SparseTensor):
        raise _unsupported("division by a SparseTensor", "its zeros would give infinities; divide by right.to_dense()")
    if not isinstance(right, Tensor) or right.dim() == 0:
        return like(left, values_of(left) / right)
    return like(left, values_of(left) / _at_entries(left, right))


@_implements(torch.reciprocal, torch.Tensor.reciprocal, torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__)
def reciprocal(input: SparseTensor, *_: Any) -> Tensor:
    """Refused."""
    raise _unsupported("division by a SparseTensor", "its zeros would give infinities; divide by to_dense()")


@_implements(torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
def add(left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    """Sparse plus sparse (their union, in the format of the first) or plus dense or a number (dense)."""
    if alpha != 1:
        right = right * alpha
    if not (isinstance(left, SparseTensor) and isinstance(right, SparseTensor)):
        dense = [to_dense(each) if isinstance(each, SparseTensor) else each for each in (left, right)]
        return dense[0] + dense[1]
    _same_shape("add", left, right)
    if _same_pattern(left, right):
        return like(left, values_of(left) + values_of(right))
    return _union(left, right)


@_implements(torch.sub, torch.Tensor.sub, torch.Tensor.__sub__)
def sub(left: Any, right: Any, *, alpha: float = 1) -> Tensor:
    """left - alpha * right, as `add`"""
    return add(left, right * -alpha)


@_implements(torch.Tensor.__rsub__, torch.rsub)
def rsub(right: Any, left: Any, *, alpha: float = 1) -> Tensor:
    """left - alpha * right, as `add`"""
    return add(left, right * -alpha)


@_implements(F.dropout)
def dropout(input: SparseTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> SparseTensor:
    """Dropout of stored values."""
    return like(input, F.dropout(values_of(input), p, training))


def _on_values(function: Function) -> Function:
    def apply(input: SparseTensor, *args: Any, **kwargs: Any) -> SparseTensor:
        return like(input, function(values_of(input), *args, **kwargs))

    return apply


for _name in _ZERO_PRESERVING:
    _function = getattr(torch, _name)
    SparseTensor.functions[_function] = SparseTensor.functions[getattr(torch.Tensor, _name)] = _on_values(_function)
SparseTensor.functions[torch.Tensor.__neg__] = _on_values(torch.neg)
SparseTensor.functions[torch.Tensor.__abs__] = _on_values(torch.abs)
SparseTensor.functions[F.relu] = _on_values(F.relu)
SparseTensor.functions[F.leaky_relu] = _on_values(F.leaky_relu)


@_implements(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__)
def pow_(input: SparseTensor, exponent: float) -> SparseTensor:
    """Powers with a positive number for exponent."""
    if isinstance(exponent, Tensor) or exponent <= 0:
        raise _unsupported("a power that is not positive", "zeros would not stay zeros; use to_dense()")
    return like(input, values_of(input) ** exponent)


# Shapes


@_implements(torch.Tensor.to_dense)
def to_dense(input: SparseTensor, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None) -> Tensor:
    """All elements."""
    letters = _letters(input)
    out = einsum(f"{letters}->{letters}", input, format="dense")
    return out if dtype is None else out.to(dtype)


@_implements(torch.t, torch.Tensor.t, torch.Tensor.T.__get__)  # type: ignore[attr-defined]
def t(input: SparseTensor) -> SparseTensor:
    """The transpose: the same arrays, read as the permuted format."""
    return transposed(input, range(input.dim() - 1, -1, -1))


@_implements(torch.transpose, torch.Tensor.transpose)
def transpose(input: SparseTensor, dim0: int, dim1: int) -> SparseTensor:
    """Two dimensions exchanged, without a copy."""
    order = list(range(input.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return transposed(input, order)


@_implements(torch.permute, torch.Tensor.permute)
def permute(input: SparseTensor, *dims: Any) -> SparseTensor:
    """The dimensions in another order, without a copy."""
    order = list(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else list(dims)
    return transposed(input, order)


@_implements(torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def m_t(input: SparseTensor) -> SparseTensor:
    """The last two dimensions exchanged."""
    return transpose(input, -2, -1)


@_implements(torch.index_select, torch.Tensor.index_select)
def index_select(input: SparseTensor, dim: int, index: Tensor) -> SparseTensor:
    """The slices that `index` names along a dimension, in its order; a slice may be named once only."""
    extent = input.shape[dim]
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= extent):
        raise IndexError(f"index_select: indices must be in [0, {extent}), got {int(index.min())} to {int(index.max())}")
    places = torch.full((extent,), -1, device=index.device).index_put_((index,), torch.arange(index.numel()))
    if int((places >= 0).sum()) != index.numel():
        raise _unsupported("index_select that names a slice twice", "use to_dense()")
    at = coordinates(input.format, input.shape, input.components)
    at[dim] = torch.where(at[dim] < extent, places[at[dim].clamp(max=max(extent - 1, 0))], -1) if extent else at[dim]
    shape = list(input.shape)
    shape[dim] = index.numel()
    kept = at[dim] >= 0
    for crd, size in zip(at, shape, strict=True):
        kept &= crd < size
    return from_entries(input.format, shape, [crd[kept] for crd in at], values_of(input)[kept])


@_implements(torch.Tensor.__getitem__)
def getitem(input: SparseTensor, index: Any) -> Tensor:
    """Rows and blocks: slices with step 1 and integer tensors for a dimension; a number gives a dense slice."""
    indices = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in indices if not isinstance(i, Tensor)]:
        at = [i is Ellipsis for i in indices].index(True)
        indices = (*indices[:at], *[slice(None)] * (input.dim() - len(indices) + 1), *indices[at + 1 :])
    if len(indices) > input.dim():
        raise IndexError(f"{len(indices)} indices for a SparseTensor of {input.dim()} dimensions")
    out, numbers = input, []
    for dim, each in enumerate(indices):
        extent = out.shape[dim]
        if isinstance(each, slice):
            start, stop, step = each.indices(extent)
            if (start, stop, step) != (0, extent, 1):
                out = index_select(out, dim, torch.arange(start, stop, step))
        elif isinstance(each, Tensor) and each.dim() == 1:
            chosen = each.nonzero().flatten() if each.dtype == torch.bool else each + (each < 0) * extent
            out = index_select(out, dim, chosen)
        elif isinstance(each, int):
            if not -extent <= each < extent:
                raise IndexError(f"index {each} is out of bounds for dimension {dim} of size {extent}")
            out = index_select(out, dim, torch.tensor([each % extent]))
            numbers.append(dim)
        else:
            raise _unsupported(f"indexing with {type(each).__name__}", "use to_dense()")
    if not numbers:
        return out
    dense = to_dense(out)
    return dense.squeeze(tuple(numbers))


# Parts


def _union(left: SparseTensor, right: SparseTensor) -> SparseTensor:
    letters, format = _letters(left), left.format
    bound = bound_to(letters, left), bound_to(letters, right)
    return made_of(in_format(lambda result: add_sparse(*bound, result), letters, format))


def _at_entries(pattern: SparseTensor, dense: Tensor) -> Tensor:
    """The elements of a dense tensor, broadcast to the shape, at the stored entries (flat)."""
    letters = _letters(pattern)
    if torch.broadcast_shapes(dense.shape, pattern.shape) != pattern.shape:
        raise GossamerError(f"a dense {list(dense.shape)} does not broadcast to the sparse {list(pattern.shape)}")
    own = letters[len(letters) - dense.dim() :]
    single = [n for n, extent in enumerate(dense.shape) if extent == 1 and pattern.shape[n - dense.dim()] != 1]
    factor = dense.squeeze(tuple(single)) if single else dense
    kept = "".join(letter for n, letter in enumerate(own) if n not in single)
    return sample(bound_to(letters, pattern), [bound_dense(kept, factor.to(pattern.dtype))])


def _autocast(*factors: Tensor) -> list[Tensor]:
    """The factors of a product, in the type that autocast wants if it is on."""
    device = factors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(factors)
    dtype = torch.get_autocast_dtype(device)
    return [like(f, values_of(f).to(dtype)) if isinstance(f, SparseTensor) else f.to(dtype) for f in factors]


def _plus(addend: Tensor, beta: float, product: Tensor, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (addend if beta == 1 else addend * beta)


def _same_shape(name: str, left: SparseTensor, right: SparseTensor) -> None:
    if left.shape != right.shape:
        raise GossamerError(f"{name} of sparse {list(left.shape)} and {list(right.shape)}: sparse operands do not broadcast")


def _same_pattern(left: SparseTensor, right: SparseTensor) -> bool:
    """Whether both share positions and coordinates; equal copies of them are not looked for."""
    if left.format != right.format:
        return False
    return all(a is b for a, b in zip(left.components[:-1], right.components[:-1], strict=True))


def _letters(tensor: Tensor) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[: tensor.dim()]


def _dims(tensor: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    given = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    wrong = [each for each in given if not -tensor.dim() <= each < tensor.dim()]
    if wrong:
        raise IndexError(f"dimension {wrong[0]} is out of range for a SparseTensor of {tensor.dim()} dimensions")
    return sorted(each % tensor.dim() for each in given) or list(range(tensor.dim()))


def _restored(out: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        out = out.unsqueeze(dim)
    return out


def _unsupported(what: str, instead: str) -> GossamerError:
    return GossamerError(f"SparseTensor: {what} is not supported; {instead}")
