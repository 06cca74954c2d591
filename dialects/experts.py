"""The ops of the kernel dialect for layers whose tokens choose experts.

A token has `top` slots, one for each expert that it chose: slot s belongs to token s / top. `order` has the slots sorted by
expert: those of expert e are order[positions[e]] to order[positions[e + 1] - 1].

weight   a matrix for each expert, row by row, or column by column if `turned` is 1. An element of i8 is an integer of 8 bits,
         or, if `four` is 1, two of 4 bits, the first in the lower half.
scales   for integers: a factor for each `group` columns of a row, or for the whole row if `group` is 0; else empty
bias     a number for each row, or empty
dots     1 if the target has an instruction that multiplies pairs of bf16
"""

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp

_WEIGHT = "weight: t[count any any], scales: f32[scaled rows groups], bias: f32[biased rows]"
_ROUTES = "positions: i64[count+1], order: i64[slots]"


class RoutedOp(KernelOp):
    """An op that multiplies rows of x with the weights of their experts."""

    top: ir.IntegerAttr
    dots: ir.IntegerAttr
    four: ir.IntegerAttr
    group: ir.IntegerAttr
    turned: ir.IntegerAttr


class RoutedProductOp(RoutedOp, name="routed_product", traits=[ext.Pure]):
    """y[s] = weight[e] x[s / top] + bias[e] for slot s of expert e. `top` is 1 if x has a row for each slot."""

    takes = f"x: f[sources columns], {_WEIGHT}, {_ROUTES}"
    gives = "result: f[slots rows]"


class RoutedHiddenOp(RoutedOp, name="routed_hidden", traits=[ext.Pure]):
    """h[n] = activation(gate) * up. `layout` says which sums of the n-th sorted slot, as from kernel.routed_product, are gate
    and which are up. If `keep` is 1, `kept` are these sums, for the gradient."""

    takes = f"x: F[sources columns], {_WEIGHT}, {_ROUTES}"
    gives = "hidden: F[slots hidden], kept: F[kept rows]"

    activation: ir.StringAttr
    layout: ir.StringAttr
    keep: ir.IntegerAttr


class RoutedSumOp(RoutedOp, name="routed_sum", traits=[ext.Pure]):
    """y[t] = the sum over the slots s of token t of scores[s] * (weight[e] h[n] + bias[e]). n is the place of s in `order`."""

    takes = f"hidden: f[slots columns], {_WEIGHT}, {_ROUTES}, scores: f32[slots]"
    gives = "result: f32[tokens rows]"


class RoutedGradientOp(RoutedOp, name="routed_gradient", traits=[ext.Pure]):
    """The gradient of kernel.routed_hidden. s is the n-th sorted slot, h the value of its activation (from `kept`).

    g[n] = weight[e] x[s / top] is the gradient of scores[s] * h.

    sums      the gradient of `kept`: scores[s] * g through the activation
    weighted  scores[s] * h
    shares    sums of g * h over 16 rows each; they add up to the gradient of scores[s]
    """

    takes = f"x: F[sources columns], {_WEIGHT}, {_ROUTES}, scores: f32[slots], kept: F[slots kept]"
    gives = "sums: F[slots kept], weighted: F[slots rows], shares: f32[slots units]"

    activation: ir.StringAttr
    layout: ir.StringAttr


class RoutedOuterOp(KernelOp, name="routed_outer", traits=[ext.Pure]):
    """y[e] = the sum over the sorted slots n of expert e of left[row] right[row]^T; zeros for an expert without slots.

    For the n-th sorted slot s, the row is s / left_top, or s / right_top. It is n if that attribute is 0.
    """

    takes = f"left: F[lefts rows], right: F[rights columns], {_ROUTES}"
    gives = "result: F[count rows columns]"

    left_top: ir.IntegerAttr
    right_top: ir.IntegerAttr
    dots: ir.IntegerAttr
