"""Emits arithmetic on scalars of one element type, float or integer, at the current insertion point."""

from collections.abc import Sequence
from functools import reduce

from torch_mlir import ir
from torch_mlir.dialects import arith


class Scalars:
    """Sums and products of elements of type `element`. They are computed in the type `wide`: f32 for f16 and bf16.

    Sums may be reordered, so that LLVM can use vectors for them.
    """

    def __init__(self, element: ir.Type) -> None:
        self.element = element
        self.floating = isinstance(element, ir.FloatType)
        self.wide = ir.F32Type.get() if self.floating and ir.FloatType(element).width < 32 else element

    def zero(self) -> ir.Value:
        """Returns 0 of the wide type."""
        return arith.constant(self.wide, 0.0 if self.floating else 0)

    def add(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Returns left + right, both wide."""
        return arith.addf(left, right, fastmath=_any_order()) if self.floating else arith.addi(left, right)

    def multiply(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Returns left * right, both wide."""
        return arith.mulf(left, right, fastmath=_any_order()) if self.floating else arith.muli(left, right)

    def product(self, factors: Sequence[ir.Value]) -> ir.Value:
        """Returns the product of wide values; 1 if there are none."""
        if not factors:
            return arith.constant(self.wide, 1.0 if self.floating else 1)
        return reduce(self.multiply, factors)

    def widened(self, value: ir.Value) -> ir.Value:
        """Converts an element to a wide value."""
        return value if value.type == self.wide else arith.extf(self.wide, value)

    def narrowed(self, value: ir.Value) -> ir.Value:
        """Converts a wide value to an element."""
        return value if value.type == self.element else arith.truncf(self.element, value)


def _any_order() -> ir.Attribute:
    return ir.Attribute.parse("#arith.fastmath<reassoc,contract>")
