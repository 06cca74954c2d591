"""Estimates the costs of products from the sizes and densities of their factors.

A sketch of a matrix is its shape and its density. It assumes that nonzeros lie at random places; then a product's do, too:

    A [m, k] B [k, n]    m k n dA dB multiply-adds,    an element of A B is zero with probability (1 - dA dB) ** k
"""

from dataclasses import dataclass

_SPARSE = 3.0
"""Cost of a multiply-add with a nonzero of a sparse matrix, in multiply-adds of a dense product."""


@dataclass(frozen=True)
class Sketch:
    """The properties of a matrix that decide the cost of its products."""

    rows: int
    columns: int
    density: float = 1.0

    @property
    def transposed(self) -> "Sketch":
        """The sketch of the transpose."""
        return Sketch(self.columns, self.rows, self.density)

    def times(self, other: "Sketch") -> "tuple[float, Sketch]":
        """Returns the cost of a product, in multiply-adds of a dense one, and the sketch of the result."""
        share = self.density * other.density
        cost = self.rows * self.columns * other.columns * min(1.0, _SPARSE * share)
        density = 1.0 if share == 1 else 1 - (1 - share) ** self.columns
        return cost, Sketch(self.rows, other.columns, density)


def cost_in_order(left: Sketch, middle: Sketch, right: Sketch, left_first: bool) -> tuple[float, float]:
    """Returns the costs of the first and the second product of a chain of three matrices, in one of the two orders."""
    if left_first:
        first, made = left.times(middle)
        second, _ = made.times(right)
    else:
        first, made = middle.times(right)
        second, _ = left.times(made)
    return first, second
