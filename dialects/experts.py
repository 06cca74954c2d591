"""The ops of the kernel dialect for layers whose tokens choose experts.

A token has `top` slots, one for each expert that it chose: slot s belongs to token s / top. Slots are sorted by their expert:
those of expert e are order[positions[e]] to order[positions[e + 1] - 1].

weight   row by row for each expert, or column by column where `turned` is 1; of i8, they are integers of 8 bits, or where
         `four` is 1 two of 4 bits, the first in the lower half
scales   of integers: a number for each `group` of a row, or for all of it where that is 0; else empty
bias     a number for each row, or empty
dots     1 where the target multiplies pairs of bf16 by one instruction
"""

from torch_mlir import ir
from torch_mlir.dialects import ext

from gossamer.dialects.kernel import KernelOp

_WEIGHT = "weight: t[count any any], scales: f32[scaled rows groups], bias: f32[biased rows]"
_ROUTES = "positions: i64[count+1], order: i64[slots]"


class RoutedOp(KernelOp):
    """One that multiplies rows of x with the weights of their experts."""

    top: ir.IntegerAttr
    dots: ir.IntegerAttr
    four: ir.IntegerAttr
    group: ir.IntegerAttr
    turned: ir.IntegerAttr


class RoutedProductOp(RoutedOp, name="routed_product", traits=[ext.Pure]):
    """y[s] = weight[e] x[s / top] + bias[e] for slot s of expert e; `top` is 1 where x has a row for each slot."""

    takes = f"x: f[sources columns], {_WEIGHT}, {_ROUTES}"
    gives = "result: f[slots rows]"


class RoutedHiddenOp(RoutedOp, name="routed_hidden", traits=[ext.Pure]):
    """h[n] = activation(gates) * up of what the n-th sorted slot gets from its expert, as `layout` says; `kept` are the sums
    that it is made of, where `keep` is 1."""

    takes = f"x: F[sources columns], {_WEIGHT}, {_ROUTES}"
    gives = "hidden: F[slots hidden], kept: F[kept rows]"

    activation: ir.StringAttr
    layout: ir.StringAttr
    keep: ir.IntegerAttr


class RoutedSumOp(RoutedOp, name="routed_sum", traits=[ext.Pure]):
    """y[t] = the sum over the slots s of token t of scores[s] * (weight[e] h[n] + bias[e]); n is the place of s in order."""

    takes = f"hidden: f[slots columns], {_WEIGHT}, {_ROUTES}, scores: f32[slots]"
    gives = "result: f32[tokens rows]"


class RoutedGradientOp(RoutedOp, name="routed_gradient", traits=[ext.Pure]):
    """The gradient g[n] = weight[e] x[s / top] of what the n-th sorted slot s gets from its activation, times scores[s], goes
    back through the activation of what was kept of it: `sums` is the gradient of that.

    weighted is scores[s] * h, of what the activation gives; shares are the sums of g * h over 16 rows each.
    """

    takes = f"x: F[sources columns], {_WEIGHT}, {_ROUTES}, scores: f32[slots], kept: F[slots kept]"
    gives = "sums: F[slots kept], weighted: F[slots rows], shares: f32[slots units]"

    activation: ir.StringAttr
    layout: ir.StringAttr


class RoutedOuterOp(KernelOp, name="routed_outer", traits=[ext.Pure]):
    """y[e] = the sum over the sorted slots n of expert e of left[row] right[row]^T; zeros without a slot.

    The row of slot s is s / top; it is n where `left_top`, or `right_top`, is 0.
    """

    takes = f"left: F[lefts rows], right: F[rights columns], {_ROUTES}"
    gives = "result: F[count rows columns]"

    left_top: ir.IntegerAttr
    right_top: ir.IntegerAttr
    dots: ir.IntegerAttr
