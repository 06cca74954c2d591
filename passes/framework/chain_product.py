"""Describes how the products of a family run in a chain: the interface of a chain's loops to a family's inner loops.

A chain runs several products for one tile of tokens after the other. A tile is [columns][tokens], with tokens in the lanes of
vectors. Inner loops either `add` to the sums of a few rows, for all tokens of the tile at once, or `store` the sums in memory.
A family gives a `ChainProduct` for each product (`Family.chain`); `chains/products.py` asks for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch_mlir import ir

Layout = Literal["columns", "lines", "rows"]
"""How a tile stores x in bf16: by columns (bf16_columns.py), by two columns side by side (bf16_pairs.py), or, for attention, by
rows, one for each token."""

_ROWS = 1024  # rows of the weight at once: so few that their sums stay in the second-level cache


class Adds(Protocol):
    """Inner loops that keep their sums in registers."""

    def add(self, panel: "ir.Value", group: "ir.Value", sums: "list[ir.Value]") -> "list[ir.Value]":
        """Returns the sums plus the products of the group's nonzeros in this panel of columns.

        `sums` has all vectors of a row, then those of the next row.
        """


@runtime_checkable
class Orders(Protocol):
    """Inner loops whose groups have different rows in each panel."""

    def members(self, panel: "ir.Value", group: "ir.Value") -> "list[ir.Value]":
        """Returns the rows of the weight that a group has in a panel."""


@runtime_checkable
class Stores(Protocol):
    """Inner loops that store their sums in memory, for `at_once` vectors of tokens in each call.

    They are called for all groups, one after the other, before the next tokens.
    """

    @property
    def at_once(self) -> int: ...

    def store(self, group: "ir.Value", sums: "ir.Value", token: "ir.Value") -> None:
        """Stores the products of a group of rows with the tokens from `token` on into `sums`, [rows, tokens]."""

    def row(self, group: "ir.Value", slot: "ir.Value") -> "ir.Value":
        """Returns the row of the weight whose products are in a slot of the sums."""


class Expands(Protocol):
    """Inner loops that expand the weights of a group once, then multiply them with tokens.

    Between the parts of a multiplication the caller can emit other work.
    """

    def expand(self, group: "ir.Value") -> None:
        """Expands the weights of a group into memory."""

    def multiply(
        self,
        packed: "ir.Value",
        token: "ir.Value",
        sums: "ir.Value",
        slot: "ir.Value",
        meanwhile: "Callable[[ir.Value], None]",
    ) -> None:
        """Stores the products of expanded weights with x, from a token on, into sums[slot], [rows, tokens].

        Calls `meanwhile` with the number of each part, in order.
        """


Loops = TypeVar("Loops", bound=Adds | Stores)
Inner = Callable[["tuple[ir.Value, ...]", "ir.Value", "ir.VectorType", int], Loops]
"""(the arrays of the weight, x in the tile, the type of a vector of sums, the number of vectors of tokens) → inner loops."""


@dataclass(frozen=True)
class Expansion:
    """How a product expands its weights.

    nbytes  bytes of memory for the expanded weights of a group
    parts   number of calls of `meanwhile` in one multiplication
    inner   makes the loops of (the arrays of the weight, that memory, the type of sums)
    few     makes inner loops for a single vector of tokens. Expanding takes most of their time, so they expand while they
            multiply.
    height  rows in each group of `few`
    """

    nbytes: int
    parts: int
    inner: Callable[["tuple[ir.Value, ...]", "ir.Value", "ir.Type"], Expands]
    few: Inner[Stores]
    height: int


@dataclass(frozen=True)
class ChainProduct:
    """How a product runs in a chain.

    tokens  most tokens of a tile
    height  rows of a group
    groups  number of groups, which threads share out
    panels  number of panels of columns. Between two panels, the sums of all rows are stored and loaded.
    reads   how x lies in the tile in bf16; None if the tile has x in the type of sums
    inner   makes the inner loops, or describes how weights are expanded
    cut     (vectors of tokens) → rows whose sums fit into registers; None if a whole group does
    among   number of neighbouring rows from which a group takes its rows, in any order. One thread takes all of them.
    stores  whether its inner loops store their sums in memory
    """

    tokens: int
    height: int
    groups: int
    panels: int
    reads: Layout | None
    inner: Inner[Adds | Stores] | Expansion
    cut: Callable[[int], int] | None = None
    among: int = 1
    stores: bool = False

    @property
    def expansion(self) -> Expansion | None:
        """How it expands its weights; None if it does not."""
        return self.inner if isinstance(self.inner, Expansion) else None

    def rows(self, vectors: int) -> int:
        """Returns the rows that the inner loops compute at once for this number of vectors of tokens: a divisor of `height`."""
        return self.height if self.cut is None else self.cut(vectors)

    def share(self, lanes: int, whole: bool) -> int:
        """Returns the fewest groups that one thread takes. If `whole`, their rows fill whole vectors."""
        return 1 if self.stores else lcm(lanes if whole else 1, self.among, self.height) // self.height

    @property
    def step(self) -> int:
        """Number of groups that go through a panel before they go through the next one."""
        return max(1, _ROWS // self.height)
