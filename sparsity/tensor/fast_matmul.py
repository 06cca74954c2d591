"""Runs eager einsums without torch's dispatcher, which takes longer than a small product.

    a @ x      →      the kernel of the call, and a node of autograd's graph if an operand requires gradients

It is for one sparse matrix times one dense tensor of the same type on the CPU. The call goes through the dispatcher, which also
has the checks and messages, for all other operands, and if something observes operations: a dispatch mode (fake tensors,
tracing), torch.jit.trace, a function transform, a tensor subclass, or the profiler. A product with a matrix in CSR stores a
`Repeated` (repeated_matmul.py) in it, which makes the next products still faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.elements import ELEMENTS
from gossamer.sparsity.arrays.row_form import stored_by_rows
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.calls import planned_call
from gossamer.sparsity.operations.dense_results import einsum_ir, einsum_of, einsum_on_cpu
from gossamer.sparsity.operations.dispatch import PLAIN, is_marked, watched
from gossamer.sparsity.operations.matrix_calls import RowProduct
from gossamer.sparsity.tensor.repeated_matmul import Repeated, matmul_again
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, values_of


@dataclass(frozen=True, eq=False)
class _Expression:
    """An einsum of operands of these formats.

    formats  kept alive, because the key has the id of the sparse one
    ranks    dimensions of each operand
    equal    pairs of dimensions, of the left and of the right operand, that must agree
    spec     the text of the operation's argument `spec`
    """

    formats: tuple[Format | None, Format | None]
    ranks: tuple[int, int]
    equal: tuple[tuple[int, int], ...]
    spec: str


_expressions: dict[tuple[tuple[str, ...], str, bool, int], _Expression] = {}

_LEFT = {1: (("ik", "k"), "i"), 2: (("ik", "kj"), "ij")}
_RIGHT = {1: (("k", "kj"), "j"), 2: (("ik", "kj"), "ij")}


def matmul_at_once(left: Tensor, right: Tensor) -> Tensor | None:
    """Returns left @ right of a sparse and a dense matrix or vector, None if it must go through the dispatcher."""
    sparse_left = type(left) is SparseTensor
    if isinstance(left, SparseTensor) and (again := matmul_again(left, right)) is not None:
        return again
    dense = right if sparse_left else left
    spelled = (_LEFT if sparse_left else _RIGHT).get(dense.dim()) if type(dense) in PLAIN else None
    if spelled is None or torch.is_autocast_enabled("cpu"):
        return None
    product = einsum_at_once(*spelled, left, right)
    if product is not None and isinstance(left, SparseTensor) and left._repeated is None and stored_by_rows(left.format, 0):
        _expect_more(left)
    return product


def _expect_more(left: SparseTensor) -> None:
    """Prepares a CSR matrix for further products, if kernels compute them."""
    dtype = left.components[-1].dtype
    if dtype in ELEMENTS and all(array.is_contiguous() and not array.is_inference() for array in left.components):
        specs = {dims: _expression(letters[0], letters[1], (left.format, None)).spec for dims, letters in _LEFT.items()}
        Repeated(left, {dims: planned_call(einsum_ir, RowProduct.of, spec, dtype) for dims, spec in specs.items()})


def einsum_at_once(letters: tuple[str, ...], result: str, left: Tensor, right: Tensor) -> Tensor | None:
    """Returns the dense einsum of a sparse and a dense operand, None if it must go through the dispatcher."""
    first = type(left) is SparseTensor
    sparse, dense = (left, right) if first else (right, left)
    if type(sparse) is not SparseTensor or type(dense) not in PLAIN or watched():
        return None
    assert isinstance(sparse, SparseTensor)
    arrays, format = sparse.components, sparse.format
    values = arrays[-1]
    if type(values) not in PLAIN or values.dtype is not dense.dtype or not (values.is_cpu and dense.is_cpu):
        return None
    with torch.DisableTorchFunctionSubclass():  # else each attribute of a subclass calls __torch_function__
        differentiated = torch.is_grad_enabled() and (sparse.requires_grad or dense.requires_grad)
        shape = tuple(sparse.shape)
        if differentiated:
            arrays = *arrays[:-1], values_of(sparse)
    if is_marked(dense) or dense.layout is not torch.strided:
        return None
    key = letters, result, first, id(format)
    call = _expressions.get(key)
    if call is None:
        if len(_expressions) > 4096:
            _expressions.clear()
        call = _expressions[key] = _expression(letters, result, (format, None) if first else (None, format))
    sizes = (shape, dense.shape) if first else (dense.shape, shape)
    if (len(sizes[0]), len(sizes[1])) != call.ranks or any(sizes[0][a] != sizes[1][b] for a, b in call.equal):
        return None
    given = [*arrays, dense] if first else [dense, *arrays]
    return (einsum_of if differentiated else einsum_on_cpu)(given, shape, call.spec)


def _expression(letters: Sequence[str], result: str, formats: tuple[Format | None, Format | None]) -> _Expression:
    operands = tuple(Operand(*each) for each in zip(letters, formats, strict=True))
    first, second = letters
    equal = tuple((at, second.index(letter)) for at, letter in enumerate(first) if letter in second)
    return _Expression(formats, (len(first), len(second)), equal, str(Spec(operands, Operand(result))))
