"""Eager einsums without torch's dispatcher and autograd, which take longer than a small product.

    a @ x      →      the kernel of the call, if nothing could want to see the operation

Who could: autograd (an operand requires gradients), a dispatch mode (fake tensors, tracing), torch.jit.trace, a function
transform, a tensor subclass, the profiler. Then, and for all that is not one sparse matrix times one dense tensor of the same
type on the CPU, the call goes the long way, which has the checks and the messages too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler

from gossamer.dialects.format import Format
from gossamer.sparsity.contract_ir import Operand
from gossamer.sparsity.dense_results import einsum_on_cpu
from gossamer.sparsity.operands import Spec
from gossamer.sparsity.tensor import SparseTensor

_DENSE = (Tensor, nn.Parameter)


@dataclass(frozen=True, eq=False)
class _Known:
    """An expression with operands of these formats.

    formats  kept, for the sparse one is recognised by its id
    ranks    dimensions of each operand
    equal    pairs of dimensions, of the left and of the right operand, that must agree
    spec     the text for the operation
    """

    formats: tuple[Format | None, Format | None]
    ranks: tuple[int, int]
    equal: tuple[tuple[int, int], ...]
    spec: str


_known: dict[tuple[tuple[str, ...], str, bool, int], _Known] = {}


_MATMUL = {1: {True: (("ik", "k"), "i"), False: (("k", "kj"), "j")}, 2: dict.fromkeys((True, False), (("ik", "kj"), "ij"))}


def matmul_at_once(left: Tensor, right: Tensor) -> Tensor | None:
    """left @ right of a sparse and a dense matrix or vector, None if it has to go the long way."""
    sparse_left = type(left) is SparseTensor
    dense = right if sparse_left else left
    spelled = _MATMUL.get(dense.dim()) if type(dense) in _DENSE else None
    if spelled is None or torch.is_autocast_enabled("cpu"):
        return None
    return einsum_at_once(*spelled[sparse_left], left, right)


def einsum_at_once(letters: tuple[str, ...], result: str, left: Tensor, right: Tensor) -> Tensor | None:
    """The dense einsum of a sparse and a dense operand, None if it has to go the long way."""
    first = type(left) is SparseTensor
    sparse, dense = (left, right) if first else (right, left)
    if type(sparse) is not SparseTensor or type(dense) not in _DENSE or _watched():
        return None
    assert isinstance(sparse, SparseTensor)
    arrays, format = sparse.components, sparse.format
    values = arrays[-1]
    if type(values) not in _DENSE or values.dtype is not dense.dtype or not (values.is_cpu and dense.is_cpu):
        return None
    with torch._C.DisableTorchFunctionSubclass():  # which every attribute of a subclass would go through
        if torch.is_grad_enabled() and (sparse.requires_grad or dense.requires_grad):
            return None
        shape = tuple(sparse.shape)
    if dense.is_neg() or dense.layout is not torch.strided:
        return None
    key = letters, result, first, id(format)
    known = _known.get(key)
    if known is None:
        if len(_known) > 4096:
            _known.clear()
        known = _known[key] = _knowledge(letters, result, (format, None) if first else (None, format))
    sizes = (shape, dense.shape) if first else (dense.shape, shape)
    if (len(sizes[0]), len(sizes[1])) != known.ranks or any(sizes[0][a] != sizes[1][b] for a, b in known.equal):
        return None
    return einsum_on_cpu([*arrays, dense] if first else [dense, *arrays], shape, known.spec)


def _knowledge(letters: Sequence[str], result: str, formats: tuple[Format | None, Format | None]) -> _Known:
    operands = tuple(Operand(*each) for each in zip(letters, formats, strict=True))
    first, second = letters
    equal = tuple((at, second.index(letter)) for at, letter in enumerate(first) if letter in second)
    return _Known(formats, (len(first), len(second)), equal, str(Spec(operands, Operand(result))))


def _watched() -> bool:
    """Whether something wants to see each operation, or to make something else of it."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    )
