"""Multiplies tokens with the weights of the experts that they chose.

gossamer::routed_product(x, experts, weight, scales, bias) -> Tensor    y[t, s] = weight[e] x[t] + bias[e], e = experts[t, s]
gossamer::routed_outer(gradient, x, experts, count) -> Tensor           the gradient of the weight

x is [tokens, columns], or [tokens, top, columns] with a row for each slot. The gradients of both operations are such products
again, so they can be differentiated any number of times.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.runtime.operations import Operation
from gossamer.sparsity.arrays.sorting import routes_of
from gossamer.sparsity.experts import kernels
from gossamer.sparsity.experts.expert_weights import Weight, floats_of
from gossamer.sparsity.experts.outer_products import outer_products
from gossamer.sparsity.operations.autocast import as_autocast
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.derivatives import Derivative

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def routed_linear(
    x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None, *, scales: Tensor | None = None
) -> Tensor:
    """Computes the linear layer of the experts that each token chose: y = weight[e] x + bias[e].

    x        [tokens, columns], or [tokens, top, columns] with a row for each expert of a token
    experts  [tokens, top] or [tokens], integers from 0 to experts - 1
    weight   [experts, rows, columns], as in nn.Linear for each expert; of the type of x, or int8, or uint8 with two integers of
             4 bits, the first in the lower half. It may be a transposed view
    bias     [experts, rows]
    scales   for integers: floats [experts, rows, groups], one for each columns / groups of a row
    returns  [tokens, top, rows], or [tokens, rows] if `experts` has one dimension

    Experts that no token chose cost nothing. It also serves many LoRA adapters in one batch: each is an expert of rank r.
    Under torch.autocast, floats get its lower precision, as in nn.Linear.
    ArgumentError for shapes that do not fit and for an expert that does not exist.
    """
    several = as_signed(experts.unsqueeze(1) if experts.dim() == 1 else experts)
    x, weight, bias = as_autocast(x), as_autocast(weight), None if bias is None else as_autocast(bias)
    y: Tensor = routed_product(x, several, weight, scales, bias)
    return y.squeeze(1) if experts.dim() == 1 else y


def as_signed(experts: Tensor) -> Tensor:
    """Returns experts of an unsigned type as int64, because the operations take signed integers."""
    return experts.long() if experts.dtype in _UNSIGNED else experts


def check_rows(name: str, x: Tensor, experts: Tensor) -> None:
    """ArgumentError unless there is a row of x for each token, or for each slot."""
    if x.dim() not in (2, 3) or x.shape[:-1] != experts.shape[: x.dim() - 1]:
        tokens, top = experts.shape
        raise ArgumentError(f"{name}: x is {[*x.shape]}, must be [{tokens}, columns] or [{tokens}, {top}, columns]")


def rows_of(x: Tensor, experts: Tensor, slots: Tensor) -> Tensor:
    """Returns the rows of x for these slots."""
    return x.flatten(0, 1).index_select(0, slots) if x.dim() == 3 else x.index_select(0, slots // experts.shape[1])


# Computation


def _product(x: Tensor, experts: Tensor, values: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    weight = Weight(values, scales, bias)
    check_rows("routed_product", x, experts)
    weight.check("weight", x.shape[-1], x.dtype)
    routes = routes_of(experts, values.shape[0])
    if kernels.served(x, weight):
        own = replace(routes, top=1) if x.dim() == 3 else routes
        return kernels.product(x.flatten(0, -2), weight, own).view(*experts.shape, weight.rows)
    out = x.new_empty((experts.numel(), weight.rows))
    for expert, begin, end in routes.hit():
        slots = routes.order[begin:end]
        out[slots] = F.linear(rows_of(x, experts, slots), *weight.of(expert, x.dtype))
    return out.view(*experts.shape, weight.rows)


def _fake_product(x: Tensor, experts: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty((*experts.shape, weight.shape[1]))


def _outer(gradient: Tensor, x: Tensor, experts: Tensor, count: int) -> Tensor:
    check_rows("routed_outer", x, experts)
    tops = 1, 1 if x.dim() == 3 else experts.shape[1]
    return outer_products(gradient.flatten(0, 1), x.flatten(0, -2), routes_of(experts, count), tops)


def _fake_outer(gradient: Tensor, x: Tensor, experts: Tensor, count: int) -> Tensor:
    return x.new_empty((count, gradient.shape[2], x.shape[-1]))


# Derivatives


def _of_rows(gradient: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient of x, from the gradients of its slots [tokens, top, columns]."""
    return gradient.sum(1) if x.dim() == 2 else gradient


def _setup(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, experts, weight, scales, bias = inputs
    ctx.scaled, ctx.bias = scales is not None, None if bias is None else (bias.shape[0], bias.dtype)
    return x, experts, weight, *([scales] if scales is not None else [])


def _gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    x, experts, weight, *scales = ctx.saved_tensors
    needed = ctx.needs_input_grad[2:]
    of_bias = ctx.bias is not None and needed[-1]
    floats = floats_of(weight, scales[0], x.dtype) if ctx.scaled and needed[0] else weight
    found = [
        _of_rows(routed_product(gradient, experts, floats.mT, None, None), x) if needed[0] else None,
        None,
        routed_outer(gradient, x, experts, weight.shape[0]) if needed[2] else None,
        *[None for _ in scales],
    ]
    if ctx.bias is not None:
        found.append(_of_bias(gradient, experts, *ctx.bias) if of_bias else None)
    return found


def _of_bias(gradient: Tensor, experts: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    out = gradient.new_zeros((count, gradient.shape[2]), dtype=wide)
    return out.index_add(0, experts.flatten().long(), gradient.flatten(0, 1).to(wide)).to(dtype)


def _tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    x, experts, weight, *scales = ctx.saved_tensors
    of_x, _, of_weight, *rest = tangents
    of_bias = rest[-1] if ctx.bias is not None else None
    parts = list[Tensor]()
    if of_x is not None:
        parts.append(routed_product(of_x, experts, weight, scales[0] if scales else None, None))
    if of_weight is not None:
        parts.append(routed_product(x, experts, of_weight, None, None))
    if of_bias is not None:
        parts.append(of_bias.to(x.dtype)[experts.long()])
    return sum(parts[1:], parts[0]) if parts else None


def _outer_gradients(ctx: Any, more: Tensor) -> Sequence[Tensor | None]:
    gradient, x, experts = ctx.saved_tensors
    of_gradient, of_x = ctx.needs_input_grad[2:4]
    return (
        routed_product(x, experts, more, None, None) if of_gradient else None,
        _of_rows(routed_product(gradient, experts, more.mT, None, None), x) if of_x else None,
        None,
    )


def _outer_tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    gradient, x, experts = ctx.saved_tensors
    of_gradient, of_x, _ = tangents
    parts = [
        routed_outer(a, b, experts, ctx.count)
        for a, b in ((of_gradient, x), (gradient, of_x))
        if a is not None and b is not None
    ]
    return sum(parts[1:], parts[0]) if parts else None


routed_product = Operation(
    "routed_product(Tensor x, Tensor experts: i[tokens top], Tensor weight: t[count rows any], Tensor? scales,"
    " Tensor? bias: f[count rows]) -> Tensor",
    _product,
    _product,
    _fake_product,
    derivative=Derivative(_setup, _gradients, _tangent),
    batched=batched_one_by_one,
).register()
routed_outer = Operation(
    "routed_outer(Tensor gradient: t[tokens top rows], Tensor x, Tensor experts: i[tokens top], SymInt count) -> Tensor",
    _outer,
    _outer,
    _fake_outer,
    derivative=Derivative("gradient x experts", _outer_gradients, _outer_tangent),
    batched=batched_one_by_one,
).register()
