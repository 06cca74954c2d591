"""Autograd's nodes between a SparseTensor and its stored values.

The gradient of a SparseTensor is one of the same pattern. With create_graph=True it has a gradient itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound, dense
from gossamer.sparsity.operations.dense_results import sample
from gossamer.sparsity.operations.dispatch import in_memory, transformed
from gossamer.sparsity.operations.same_pattern import share_pattern, values_on
from gossamer.sparsity.operations.sparse_results import pick
from gossamer.sparsity.tensor.entries import letters_of


def with_gradient(kind: Any, format: Format, shape: Sequence[int], structure: Sequence[Tensor], values: Tensor) -> Any:
    """Returns the SparseTensor of these arrays (`kind` is the class); gradients flow to the values (flat)."""
    if transformed(values):
        return kind(format, shape, (*structure, values))  # its values carry their derivatives
    values = in_memory(values)
    if not (values.requires_grad and torch.is_grad_enabled()):
        return kind(format, shape, (*structure, values.detach()))
    return _Wrap.apply(values, kind, format, tuple(shape), *structure)


class ValuesOf(torch.autograd.Function):
    """SparseTensor → its values; the gradient is a SparseTensor of the same pattern."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        *structure, values = tensor.components
        ctx.save_for_backward(*structure)
        ctx.kind, ctx.format, ctx.shape = type(tensor), tensor.format, tensor.shape
        detached: Tensor = values.detach()
        return detached

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return with_gradient(ctx.kind, ctx.format, ctx.shape, ctx.saved_tensors, grad)
        return ctx.kind(ctx.format, ctx.shape, (*ctx.saved_tensors, in_memory(grad)))


class _Wrap(torch.autograd.Function):
    """Values → SparseTensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: Any, format: Format, shape: Sequence[int], *structure: Tensor) -> Any:
        ctx.set_materialize_grads(False)  # else a missing gradient becomes dense zeros
        ctx.kind, ctx.format, ctx.shape, ctx.structure, ctx.nnz = kind, format, shape, structure, values.shape[0]
        return kind(format, shape, (*structure, values.detach()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, ...]:
        values = None if grad is None else _on_pattern(ctx, grad)
        return values, None, None, None, *[None] * len(ctx.structure)


def _on_pattern(ctx: Any, grad: Any) -> Tensor:
    """Returns the elements of a gradient, sparse or dense, at the entries of the result (flat)."""
    if isinstance(grad, ctx.kind):
        values = grad.values().flatten() if torch.is_grad_enabled() else grad.components[-1]
        *structure, _ = grad.components
        if grad.format == ctx.format and share_pattern(structure, ctx.structure):
            on_pattern: Tensor = values_on(ctx.structure, structure, values)
            return on_pattern
    letters = letters_of(grad)
    ones = torch.ones(ctx.nnz, dtype=grad.dtype, device=grad.device)
    pattern = Bound(Operand(letters, ctx.format), (*ctx.structure, ones), ctx.shape)
    if isinstance(grad, ctx.kind):
        return pick(Bound(Operand(letters, grad.format), (*structure, values), tuple(grad.shape)), pattern)
    return sample(pattern, [dense(letters, grad)])
