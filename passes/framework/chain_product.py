"""How the products of a family run in a chain: what a tile of tokens gives to their inner loops, and what it gets from them.

A tile is [columns][tokens], with tokens in the lanes. Inner loops `add` to the sums of a few rows, all tokens of the tile at
once, or `store` them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch_mlir import ir

Layout = Literal["columns", "lines", "rows"]
"""How x lies in the tile where it is bf16: columns (bf16_columns.py), two side by side (bf16_pairs.py), or, for attention, rows
of tokens as they come."""

_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache


class Adds(Protocol):
    """Inner loops whose sums are in registers."""

    def add(self, panel: "ir.Value", group: "ir.Value", sums: "list[ir.Value]") -> "list[ir.Value]":
        """sums (all vectors of a row, then those of the next) + what the group's nonzeros in this panel of columns give."""


@runtime_checkable
class Orders(Protocol):
    """Inner loops whose groups have other rows in each panel."""

    def members(self, panel: "ir.Value", group: "ir.Value") -> "list[ir.Value]":
        """The rows of the weight that a group has in a panel."""


@runtime_checkable
class Stores(Protocol):
    """Inner loops that leave their sums in memory; for `at_once` vectors of tokens, if those of all groups come one after the
    other."""

    @property
    def at_once(self) -> int: ...

    def store(self, group: "ir.Value", sums: "ir.Value", token: "ir.Value") -> None:
        """The products of a group of rows into `sums`, [rows, tokens], for the tokens from `token` on."""

    def row(self, group: "ir.Value", slot: "ir.Value") -> "ir.Value":
        """The row of the weight whose products are in a slot of the sums."""


class Expands(Protocol):
    """Inner loops that expand the weights of a group once, and multiply them with tokens while the caller does something."""

    def expand(self, group: "ir.Value") -> None:
        """The weights of a group into memory."""

    def multiply(
        self,
        packed: "ir.Value",
        token: "ir.Value",
        sums: "ir.Value",
        slot: "ir.Value",
        meanwhile: "Callable[[ir.Value], None]",
    ) -> None:
        """The products with x from a token on into sums[slot], [rows, tokens]; `meanwhile` gets the numbers of its
        parts in order."""


Loops = TypeVar("Loops", bound=Adds | Stores)
Inner = Callable[["tuple[ir.Value, ...]", "ir.Value", "ir.VectorType", int], Loops]
"""(the arrays of the weight, x in the tile, a vector of sums, vectors of tokens) → inner loops."""


@dataclass(frozen=True)
class Expansion:
    """How a product expands its weights.

    nbytes  of memory for a group
    parts   in how many of them something happens meanwhile
    inner   makes the loops of (the arrays of the weight, that memory, the type of sums)
    few     makes inner loops for a single vector of tokens: these are bound by expanding, and do it while they multiply
    height  of the groups of those
    """

    nbytes: int
    parts: int
    inner: Callable[["tuple[ir.Value, ...]", "ir.Value", "ir.Type"], Expands]
    few: Inner[Stores]
    height: int


@dataclass(frozen=True)
class ChainProduct:
    """How a product runs in a chain.

    tokens  of a tile at most
    groups  of rows, `height` each: what threads share out
    panels  of columns: the sums of all rows are stored and loaded between two of them
    reads   how x lies in the tile, None for sums
    inner   makes the inner loops, or says how weights are expanded
    cut     (vectors of tokens) → rows whose sums are in registers, where these are not all of a group
    among   rows of the weight, side by side, among which those of a group lie anywhere: threads do not share these out
    stores  whether its inner loops leave their sums in memory
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
        """How it expands its weights, if it does."""
        return self.inner if isinstance(self.inner, Expansion) else None

    def rows(self, vectors: int) -> int:
        """Rows that the inner loops take at once, with so many vectors of tokens: a divisor of `height`."""
        return self.height if self.cut is None else self.cut(vectors)

    def share(self, lanes: int, whole: bool) -> int:
        """Groups that one thread takes at least: those of `whole` vectors of rows, if that is asked for."""
        return 1 if self.stores else lcm(lanes if whole else 1, self.among, self.height) // self.height

    @property
    def step(self) -> int:
        """Groups that go through a panel before the next panel."""
        return max(1, _ROWS // self.height)
