"""torch's functions for products of SparseTensors. All of them are einsums, or SDDMM."""

from collections.abc import Callable, Sequence
from functools import reduce
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.compiler.operands import dense as bound_dense
from gossamer.sparsity.operations.autocast import as_autocast, autocast_dtype
from gossamer.sparsity.operations.dense_results import sample
from gossamer.sparsity.operations.open_sizes import agree
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.coordinate_list import CoordinateList
from gossamer.sparsity.tensor.densify import densified
from gossamer.sparsity.tensor.einsum import einsum
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.fast_matmul import matmul_at_once
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to, like, values_of


@implements(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm,
            torch.Tensor.bmm, torch.linalg.matmul, torch.smm, torch.Tensor.smm, torch.hspmm)  # fmt: skip
def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right of any dimensions, one or both sparse. The product of two sparse matrices is sparse."""
    return _product(left, right, _autocast)


@implements(torch.mv, torch.Tensor.mv, torch.dot, torch.Tensor.dot)
def unconverted(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right. As in torch, autocast does not convert the operands."""
    return _product(left, right, lambda operand: operand)


def _product(left: Tensor, right: Tensor, converted: Callable[[Tensor], Tensor]) -> Tensor:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        raise TypeError(f"matmul takes tensors, got {type(left).__name__} and {type(right).__name__}: see torch.as_tensor")
    if not torch.compiler.is_compiling() and (product := matmul_at_once(left, right)) is not None:
        return product
    left, right = converted(left), converted(right)
    _check_product("matmul", left, right)
    if left.dim() > 2 and right.dim() == 2 and not isinstance(left, SparseTensor):
        return einsum("ik,kj->ij", left.flatten(0, -2), right).unflatten(0, left.shape[:-1])
    return _batched(left, right)


@implements(torch.sparse.mm)
def sparse_mm(left: Tensor, right: Tensor, reduce: str = "sum") -> Tensor:
    """Returns left @ right, or means or extremes in place of its sums. The terms are products with the stored entries of a row.

    reduce  "sum"; or "mean", "amax" or "amin" with a sparse left and a dense right matrix. Rows without entries give 0
    """
    if reduce == "sum":
        return matmul(left, right)
    if not isinstance(left, SparseTensor) or isinstance(right, SparseTensor) or reduce not in ("mean", "amax", "amin"):
        raise unsupported(f"torch.sparse.mm with reduce={reduce!r} of these operands", "reduce is sum, mean, amax or amin")
    entries = CoordinateList.of(left)
    row, column = entries.at
    if reduce == "mean":
        count = torch.zeros(left.shape[0], dtype=torch.int64, device=left.device).index_add(0, row, torch.ones_like(row))
        _check_product("sparse.mm", left, right)
        wide = torch.promote_types(left.dtype, torch.float32) if left.dtype.is_floating_point else left.dtype
        total = matmul(like(left, values_of(left).to(wide)), right.to(wide))  # a sum may exceed the range of float16
        mean = total / count.clamp(min=1)[:, None]
        return mean.to(left.dtype) if left.dtype.is_floating_point else mean
    terms = entries.values[:, None] * right.index_select(0, column)
    nothing = terms.new_zeros(left.shape[0], right.shape[1])
    return nothing.scatter_reduce(0, row[:, None].expand_as(terms), terms, reduce, include_self=False)


@implements(torch.Tensor.__rmatmul__)
def rmatmul(right: Tensor, left: Tensor) -> Tensor:
    """Returns left @ right."""
    return matmul(left, right)


@implements(torch.addmm, torch.Tensor.addmm, torch.sparse.addmm)
def addmm(addend: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Returns beta * addend + alpha * (left @ right)."""
    with sizes_stay_inside():
        product = matmul(left, right)
    return _plus(_autocast(addend), beta, product, alpha)


@implements(torch.addmv, torch.Tensor.addmv)
def addmv(addend: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Returns beta * addend + alpha * (matrix @ vector)."""
    return _plus(addend, beta, unconverted(matrix, vector), alpha)


@implements(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns input @ weight.T + bias, for a sparse weight, a sparse input, or both."""
    input, weight = _autocast(input), _autocast(weight)
    _check_product("linear", input, weight, summed=-1)
    with sizes_stay_inside():
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        out = einsum("tk,mk->tm", rows, weight, format="dense")
    out = out if bias is None else out + bias.to(out.dtype)
    return out if input.dim() == 2 else out.reshape(*input.shape[:-1], weight.shape[0])


@implements(torch.sparse.sampled_addmm)
def sampled_addmm(pattern: SparseTensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> SparseTensor:
    """Returns beta * pattern + alpha * (left @ right) at the entries of the pattern (SDDMM)."""
    batch = _LETTERS[: max(pattern.dim() - 2, 0)]
    matrix = bound_to(f"{batch}ij", pattern)
    for operand in (left, right):
        if operand.dim() != pattern.dim():
            shapes = ", ".join(str(list(each.shape)) for each in (pattern, left, right))
            raise ArgumentError(f"sampled_addmm of {shapes}: all three are matrices, or all have the same batch in front")
    sampled = sample(matrix, [bound_dense(f"{batch}ik", left), bound_dense(f"{batch}kj", right)])
    return like(pattern, beta * matrix.values + alpha * sampled)


def _batched(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right, with batches that broadcast."""
    one, other = (each.dim() > 1 for each in (left, right))
    batches = "..." if max(left.dim(), right.dim()) > 2 else ""
    inputs = f"{batches if left.dim() > 2 else ''}{'i' * one}k,{batches if right.dim() > 2 else ''}k{'j' * other}"
    return einsum(f"{inputs}->{batches}{'i' * one}{'j' * other}", left, right)


def _check_product(name: str, left: Tensor, right: Tensor, summed: int = -2) -> None:
    """ArgumentError if left @ right is impossible. It sums over the last dimension of left and dimension `summed` of right."""
    if problem := _problem(left, right, max(summed, -right.dim())):  # the full text would take longer than a small product
        raise ArgumentError(f"{name} of {_described(left)} and {_described(right)}: {problem}")


def _problem(left: Tensor, right: Tensor, summed: int) -> str | None:
    """Returns why a product is impossible, None if it is possible."""
    if not left.dim() or not right.dim():
        return "both need dimensions; multiply by a number with *"
    if not agree(left.shape[-1], right.shape[summed]):
        of_right = "the last" if summed == -1 else "the one before the last"
        return f"the last size of the first must equal {of_right} of the second, {right.shape[summed]}"
    if max(left.dim(), right.dim()) > 2:
        try:
            torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        except RuntimeError:
            return "their batches, all sizes but the last two, must be equal or 1"
    return None if left.dtype == right.dtype else "convert the operands to one dtype with .to()"


def _described(tensor: Tensor) -> str:
    kind = f"a SparseTensor in {tensor.format.name}" if isinstance(tensor, SparseTensor) else "a tensor"
    return f"{kind} {list(tensor.shape)} of {tensor.dtype}"


def _autocast(operand: Tensor) -> Tensor:
    """Does `as_autocast` to a sparse or dense operand."""
    if not isinstance(operand, SparseTensor):
        return as_autocast(operand)
    dtype = autocast_dtype(operand)
    return operand if dtype == operand.dtype else like(operand, values_of(operand).to(dtype))


def _plus(addend: Tensor, beta: float, product: Tensor, alpha: float) -> Tensor:
    if not product.is_floating_point() and not product.is_complex():
        beta, alpha = int(beta), int(alpha)  # as torch does for integers
    dtype = product.dtype
    product = product if alpha == 1 else product * alpha
    total = product if beta == 0 else product + (addend if beta == 1 else addend * beta)
    return total.to(dtype) if dtype is torch.bool else total


@implements(torch.einsum)
def torch_einsum(equation: Any, *operands: Any) -> Tensor:
    """Calls `gossamer.einsum` for torch.einsum: operands one by one, in a list, or each followed by numbers for its letters."""
    if isinstance(equation, Tensor):
        operands = equation, *operands
        numbers = [*operands[1::2], *operands[len(operands) // 2 * 2 :]]
        letters = ["".join(_LETTERS[n] if n is not Ellipsis else "..." for n in each) for each in numbers]
        count = len(operands) // 2
        equation = "->".join([",".join(letters[:count]), *letters[count:]])
        operands = operands[: 2 * count : 2]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if _sums_products(equation, operands):
        operands = tuple(map(_autocast, operands))
    return einsum(equation, *operands)


def _sums_products(equation: Any, operands: Any) -> bool:
    """Whether torch computes an einsum by products of matrices, to which autocast applies: operands share a summed letter."""
    if not isinstance(equation, str) or not all(isinstance(each, Tensor) for each in operands):
        return False  # einsum says what it takes
    left, arrow, result = equation.partition("->")
    inputs = [set(each) for each in left.replace(" ", "").replace(".", "").split(",")]
    shared = {letter for each in inputs for letter in each if sum(letter in other for other in inputs) > 1}
    return bool(shared - set(result) if arrow else shared)


_LETTERS = ascii_uppercase + ascii_lowercase


@implements(torch.matrix_power, torch.Tensor.matrix_power, torch.linalg.matrix_power)
def matrix_power(input: SparseTensor, n: int) -> Tensor:
    """Returns a product of n equal matrices, sparse for n > 0."""
    if n < 1:
        dense: Tensor = densified(torch.linalg.matrix_power, (input, n), {})
        return dense
    if n == 1:
        return input.clone()
    half = matrix_power(input, n // 2)
    return half @ half @ input if n % 2 else half @ half


@implements(torch.linalg.multi_dot)
def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the product of these matrices, from the right if the last is dense."""
    if isinstance(tensors[-1], SparseTensor):
        return reduce(torch.matmul, tensors)
    return reduce(lambda product, each: each @ product, reversed(tensors))


@implements(torch.chain_matmul)
def chain_matmul(*matrices: Tensor) -> Tensor:
    """Does `multi_dot`."""
    return multi_dot(matrices)
