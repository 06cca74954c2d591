"""Prepares operands for the kernels of experts, and calls them with tensors of torch.

Kernels compute with f32, bf16 and f16 on CPUs. Integer weights are multiplied by tokens of f32, or of bf16 if each row has one
scale and the CPU multiplies pairs of bf16.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.experts import (
    RoutedGradientOp,
    RoutedHiddenOp,
    RoutedOp,
    RoutedOuterOp,
    RoutedProductOp,
    RoutedSumOp,
)
from gossamer.runtime.experts.routes import Routes
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.target import host
from gossamer.sparsity.compiler.op_ir import op_ir
from gossamer.sparsity.compiler.op_kernels import kernel_on, run, schedule_of
from gossamer.sparsity.experts.expert_weights import Weight

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_VECTOR = 16  # elements of the widest vector
_UNIT = 16  # rows whose shares of a score's gradient a kernel sums
_FEW_TOKENS, _FEW_SLOTS = 16, 4  # tokens of a batch, and slots of an expert, up to which reading weights dominates


def served(x: Tensor, *weights: Weight) -> bool:
    """Whether there are kernels for tokens and weights."""
    return x.is_cpu and x.dtype in _FLOATS and all(map(_readable, weights))


def multiplies(left: Tensor, right: Tensor) -> bool:
    """Whether there is a kernel for outer products of these rows."""
    return left.is_cpu and left.dtype in _FLOATS and left.dtype == right.dtype


def _readable(weight: Weight) -> bool:
    """Whether a kernel can read a weight: contiguous, or transposed if floats, and with groups of whole vectors."""
    if weight.scales is None:
        return weight.values.is_contiguous() or weight.values.mT.is_contiguous()
    if not weight.values.is_contiguous():
        return False
    groups = weight.scales.shape[2]
    size = weight.columns // groups
    return size % (2 * _VECTOR) == 0 if weight.four else groups == 1 or size % _VECTOR == 0


@dataclass(frozen=True)
class _Ready:
    """The operands of a kernel (rows of x, the weight, its scales and bias, the routes), and its attributes."""

    operands: list[Tensor]
    attributes: dict[str, Any]


def _ready(x: Tensor, weight: Weight, routes: Routes) -> _Ready:
    rows, values = weight.values.shape[1], weight.values
    turned = not values.is_contiguous()
    scales = _nothing(rows, 1) if weight.scales is None else weight.scales.float().contiguous()
    bias = _nothing(rows) if weight.bias is None else weight.bias.detach().float().contiguous()
    group = 0 if weight.scales is None or scales.shape[2] == 1 else weight.columns // scales.shape[2]
    dots = _multiplies_pairs(x.dtype) and x.shape[1] % 2 == 0 and not weight.four and not group
    if weight.scales is not None and not host().dots_are_fast and _few_slots(routes):
        dots = False
    if weight.scales is not None and not dots:
        x = x.float()
    if weight.four:
        x = x.unflatten(1, (-1, _lanes(), 2)).mT.flatten(1)
        values = values.view(torch.int8)
    operands = [x.contiguous(), values.mT if turned else values, scales, bias, routes.positions, routes.order]
    return _Ready(
        operands, {"top": routes.top, "dots": int(dots), "four": int(weight.four), "group": group, "turned": int(turned)}
    )


@lru_cache(64)
def _nothing(*sizes: int) -> Tensor:
    """Returns an empty tensor [0, *sizes] for an operand that is left out."""
    return torch.empty(0, *sizes, dtype=torch.float32, device="cpu")


def _few_slots(routes: Routes) -> bool:
    """Whether experts have so few slots, however they are distributed, that reading weights takes longer than multiplying."""
    slots = routes.order.numel()
    return slots <= _FEW_TOKENS * routes.top and slots <= _FEW_SLOTS * (routes.positions.numel() - 1)


def _multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether the CPU has an instruction for pairs of elements of this dtype."""
    return dtype == torch.bfloat16 and "bf16dots" in host().instructions and host().vector_bits == 512


def _lanes() -> int:
    return host().vector_bits // 32


def one_expert(dtype: torch.dtype, columns: int) -> RegionKernel:
    """Returns the kernel of a product with one expert, for x, the weight [rows, columns], and routes; no scales, no bias."""
    return float_kernel(RoutedProductOp, dtype, columns, 1, False)


def float_kernel(op: type[RoutedOp], dtype: torch.dtype, columns: int, top: int, turned: bool, **more: Any) -> RegionKernel:
    """Returns the kernel of an op on floats of one dtype, for weights with these columns, maybe transposed (`turned`)."""
    others = {RoutedProductOp: (dtype,), RoutedHiddenOp: (dtype, dtype), RoutedSumOp: (torch.float32,) * 2}[op]
    types = dtype, dtype, torch.float32, torch.float32, torch.int64, torch.int64, *others
    dots = _multiplies_pairs(dtype) and columns % 2 == 0
    attributes = {**more, "top": top, "dots": int(dots), "four": 0, "group": 0, "turned": int(turned)}
    kernel = kernel_on(torch.device("cpu"), op_ir, (op, types, (), tuple(attributes.items())), schedule_of(op))
    assert isinstance(kernel, RegionKernel)
    return kernel


def product(x: Tensor, weight: Weight, routes: Routes) -> Tensor:
    """Returns weight[e] x + bias[e], [slots, rows] in x's dtype. x is [tokens, columns], or [slots, columns] if top is 1."""
    ready = _ready(x, weight, routes)
    out = empty((routes.order.numel(), weight.rows), x.dtype)
    run(RoutedProductOp, ready.operands, [out], **ready.attributes)
    return out


def hidden(x: Tensor, weight: Weight, routes: Routes, activation: str, layout: str, keep: bool) -> tuple[Tensor, Tensor]:
    """Returns hidden elements [slots, hidden] in the order of the routes, and the sums [slots, rows] before, if kept."""
    ready, slots, rows = _ready(x, weight, routes), routes.order.numel(), weight.rows
    dtype = ready.operands[0].dtype
    out = empty((slots, rows if layout == "up" else rows // 2), dtype)
    kept = empty((slots if keep else 0, rows), dtype)
    run(RoutedHiddenOp, ready.operands, [out, kept], activation=activation, layout=layout, keep=int(keep), **ready.attributes)
    return out, kept if kept.dtype == x.dtype else kept.to(x.dtype)


def summed(hidden: Tensor, weight: Weight, routes: Routes, scores: Tensor) -> Tensor:
    """Returns the sum over a token's slots of score * (weight[e] h + bias[e]), [tokens, rows] in f32."""
    ready = _ready(hidden, weight, routes)
    out = empty((scores.shape[0], weight.rows), torch.float32)
    given = [*ready.operands, scores.detach().float().reshape(-1).contiguous()]
    run(RoutedSumOp, given, [out], {"tokens": len(out)}, **ready.attributes)
    return out


def gradient(
    x: Tensor, weight: Weight, routes: Routes, scores: Tensor, kept: Tensor, activation: str, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients through the activations of slots, in the order of the routes, from the gradient x [tokens, columns].

    weight   a weight whose product with x is the gradient of the hidden elements
    kept     the sums [slots, ...] before the activation
    returns  the gradient of `kept` and the hidden elements, both times the score of the slot; the gradients of scores, f32
    """
    ready, slots = _ready(x, weight, routes), routes.order.numel()
    sums, weighted = empty(kept.shape, x.dtype), empty((slots, weight.rows), x.dtype)
    shares = empty((slots, -(-weight.rows // _UNIT)), torch.float32)
    given = [*ready.operands, scores.detach().float().reshape(-1).contiguous(), kept.detach().contiguous()]
    run(RoutedGradientOp, given, [sums, weighted, shares], activation=activation, layout=layout, **ready.attributes)
    return sums, weighted, shares.sum(1)


def outer(left: Tensor, right: Tensor, routes: Routes, tops: tuple[int, int]) -> Tensor:
    """Returns, for each expert, the sum over its slots of the outer products of their rows, [experts, rows, columns]."""
    given = [left.detach().contiguous(), right.detach().contiguous(), routes.positions, routes.order]
    out = empty((len(routes.positions) - 1, left.shape[1], right.shape[1]), left.dtype)
    run(RoutedOuterOp, given, [out], left_top=tops[0], right_top=tops[1], dots=int(_multiplies_pairs(left.dtype)))
    return out
