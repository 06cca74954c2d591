"""Runs eager SDDMM without torch's dispatcher and autograd, which take longer than the SDDMM of a small graph.

einsum("ij,ik,jk->ij", a, x, y)      →      the kernel of the call, if nothing observes operations (see fast_matmul.py)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.dense_results import sample_on_cpu
from gossamer.sparsity.operations.dispatch import is_plain, watched
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

_specs: dict[tuple[tuple[str, ...], int], tuple[Format, str]] = {}  # keeps the format alive, because its id is in the key


def sample_at_once(inputs: tuple[str, ...], result: str, operands: Sequence[Tensor]) -> SparseTensor | None:
    """Returns a sparse matrix times sums of products of dense factors, None if the call must go through the dispatcher."""
    pattern, *factors = operands
    if type(pattern) is not SparseTensor or inputs[0] != result or len(inputs) != len(operands) or watched():
        return None
    assert isinstance(pattern, SparseTensor)
    arrays, format = pattern.components, pattern.format
    values = arrays[-1]
    if not is_plain(values) or not all(is_plain(factor) and factor.dtype is values.dtype for factor in factors):
        return None
    with torch.DisableTorchFunctionSubclass():  # else each attribute of a subclass calls __torch_function__
        if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
            return None
        shape = tuple(pattern.shape)
    if not _fit(inputs, [shape, *(factor.shape for factor in factors)]):
        return None
    key = inputs, id(format)
    known = _specs.get(key)
    if known is None:
        if len(_specs) > 4096:
            _specs.clear()
        factors_of = (Operand(letters) for letters in inputs[1:])
        known = _specs[key] = format, str(Spec((Operand(result, format), *factors_of), Operand("p")))
    sampled = sample_on_cpu([*arrays, *factors], shape, known[1])
    return SparseTensor(format, shape, (*arrays[:-1], sampled.mul_(values)))


def _fit(inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether dimensions with the same letter have the same size."""
    sizes: dict[str, int] = {}
    for letters, shape in zip(inputs, shapes, strict=True):
        if len(letters) != len(shape) or any(sizes.setdefault(*each) != each[1] for each in zip(letters, shape, strict=True)):
            return False
    return True
