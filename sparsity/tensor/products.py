"""Products of SparseTensors, as torch spells them. All of them are einsums, or SDDMM."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.sparsity.kernels.operands import dense as bound_dense
from gossamer.sparsity.operations.dense_results import sample
from gossamer.sparsity.tensor.einsum import einsum
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.fast_matmul import matmul_at_once
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to, like, values_of


@implements(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.mv, torch.Tensor.mv,
             torch.bmm, torch.Tensor.bmm, torch.sparse.mm, torch.dot, torch.Tensor.dot)  # fmt: skip
def matmul(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of up to three dimensions, one or both sparse; two sparse matrices give a sparse one."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        raise TypeError(f"matmul takes tensors, got {type(left).__name__} and {type(right).__name__}: see torch.as_tensor")
    if not torch.compiler.is_compiling() and (product := matmul_at_once(left, right)) is not None:
        return product
    left, right = _autocast(left, right)
    spelled = {(1, 1): "k,k->", (2, 1): "ik,k->i", (1, 2): "k,kj->j", (2, 2): "ik,kj->ij", (3, 3): "bik,bkj->bij",
               (3, 2): "bik,kj->bij", (2, 3): "ik,bkj->bij", (3, 1): "bik,k->bi"}  # fmt: skip
    ranks = left.dim(), right.dim()
    if ranks in spelled:
        return einsum(spelled[ranks], left, right)
    if ranks[1] == 2 and ranks[0] > 3 and not isinstance(left, SparseTensor):
        return einsum("ik,kj->ij", left.flatten(0, -2), right).unflatten(0, left.shape[:-1])
    raise unsupported(f"matmul of {ranks[0]} and {ranks[1]} dimensions", "use gossamer.einsum")


@implements(torch.Tensor.__rmatmul__)
def rmatmul(right: Tensor, left: Tensor) -> Tensor:
    """left @ right"""
    return matmul(left, right)


@implements(torch.addmm, torch.Tensor.addmm, torch.sparse.addmm)
def addmm(addend: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * addend + alpha * (left @ right)"""
    return _plus(addend, beta, matmul(left, right), alpha)


@implements(torch.addmv, torch.Tensor.addmv)
def addmv(addend: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * addend + alpha * (matrix @ vector)"""
    return _plus(addend, beta, matmul(matrix, vector), alpha)


@implements(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight.T + bias, with a sparse weight, a sparse input, or both"""
    input, weight = _autocast(input, weight)
    rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    out = einsum("tk,mk->tm", rows, weight, format="dense")
    out = out if bias is None else out + bias.to(out.dtype)
    return out if input.dim() == 2 else out.reshape(*input.shape[:-1], weight.shape[0])


@implements(torch.sparse.sampled_addmm)
def sampled_addmm(pattern: SparseTensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> SparseTensor:
    """beta * pattern + alpha * (left @ right), at the entries of the pattern (SDDMM)"""
    matrix = bound_to("ij", pattern)
    sampled = sample(matrix, [bound_dense("ik", left), bound_dense("kj", right)])
    return like(pattern, beta * matrix.values + alpha * sampled)


def _autocast(*factors: Tensor) -> list[Tensor]:
    """The factors of a product, in the type that autocast wants if it is on."""
    device = factors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(factors)
    dtype = torch.get_autocast_dtype(device)
    return [like(f, values_of(f).to(dtype)) if isinstance(f, SparseTensor) else f.to(dtype) for f in factors]


def _plus(addend: Tensor, beta: float, product: Tensor, alpha: float) -> Tensor:
    if not product.is_floating_point() and not product.is_complex():
        beta, alpha = int(beta), int(alpha)  # as torch has it for integers
    dtype = product.dtype
    product = product if alpha == 1 else product * alpha
    total = product if beta == 0 else product + (addend if beta == 1 else addend * beta)
    return total.to(dtype) if dtype is torch.bool else total
