"""Expected costs of products, from the sizes and the densities of their factors.

A sketch of a matrix is its shape and the share of its nonzeros. Where these lie anywhere, those of a product do, too:

    A [m, k] B [k, n]    m k n dA dB multiply-adds,    an element of A B is zero with probability (1 - dA dB) ** k
"""

from dataclasses import dataclass

_SPARSE = 3.0
"""What a multiply-add with a nonzero costs, in those of a dense product."""


@dataclass(frozen=True)
class Sketch:
    """A matrix, as far as its products cost."""

    rows: int
    columns: int
    density: float = 1.0

    @property
    def transposed(self) -> "Sketch":
        """That of the transpose."""
        return Sketch(self.columns, self.rows, self.density)

    def times(self, other: "Sketch") -> "tuple[float, Sketch]":
        """The cost of a product in multiply-adds of a dense one, and its sketch."""
        share = self.density * other.density
        cost = self.rows * self.columns * other.columns * min(1.0, _SPARSE * share)
        density = 1.0 if share == 1 else 1 - (1 - share) ** self.columns
        return cost, Sketch(self.rows, other.columns, density)


def cost_in_order(left: Sketch, middle: Sketch, right: Sketch, left_first: bool) -> tuple[float, float]:
    """What both products of a chain of three cost, in one of its orders."""
    if left_first:
        first, made = left.times(middle)
        second, _ = made.times(right)
    else:
        first, made = middle.times(right)
        second, _ = left.times(made)
    return first, second
