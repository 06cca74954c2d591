"""Describes one level of a format: which coordinate it stores, and how."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from gossamer.dialects.errors import FormatError

Kind = Literal["dense", "batch", "compressed", "loose_compressed", "singleton", "structured"]

_EXPR = re.compile(r"d(0|[1-9]\d*)(?: (floordiv|mod) ([1-9]\d*))?")
PROPERTIES = ("nonunique", "nonordered", "soa")  # in the order that MLIR prints
_MAY_HAVE: dict[str, tuple[str, ...]] = {
    "compressed": ("nonunique", "nonordered"),
    "loose_compressed": ("nonunique", "nonordered"),
    "singleton": PROPERTIES,
}


@dataclass(frozen=True)
class Level:
    """One level of storage.

    expr        `d1` (a whole dimension), `d1 floordiv 16` (its block) or `d1 mod 16` (the place in the block)
    kind        dense, batch, compressed, loose_compressed, singleton or structured
    nonunique   a coordinate may occur more than once under one parent
    nonordered  coordinates need not ascend
    soa         each singleton level has its own array, instead of one interleaved array for all
    structured  (n, m) for a structured level: n of every m elements are stored
    """

    expr: str
    kind: Kind = "dense"
    nonunique: bool = False
    nonordered: bool = False
    soa: bool = False
    structured: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        match = _EXPR.fullmatch(self.expr)
        if not match or match[3] == "1":
            raise FormatError(f"a level holds dN, dN floordiv B or dN mod B with B > 1, not '{self.expr}'")
        if self.kind not in get_args(Kind):
            raise FormatError(f"unknown level kind '{self.kind}', there are {', '.join(get_args(Kind))}")
        for name in PROPERTIES:
            if getattr(self, name) and name not in _MAY_HAVE.get(self.kind, ()):
                raise FormatError(f"a {self.kind} level cannot be {name}")
        if (self.kind == "structured") != (self.structured is not None):
            raise FormatError("a structured level, and no other, needs its sizes: structured[n, m]")
        # MLIR stores each of the two numbers in 8 bits and silently wraps larger ones.
        if self.structured and not 1 <= self.structured[0] <= self.structured[1] <= 255:
            raise FormatError(f"structured{list(self.structured)} is not 1 <= n <= m <= 255")

    @property
    def dim(self) -> int:
        """The dimension whose coordinate this level stores."""
        return int(self.expr.split()[0][1:])

    @property
    def block(self) -> int:
        """B of `floordiv B` or `mod B`; 1 for a whole dimension."""
        return int(self.expr.split()[-1]) if " " in self.expr else 1

    @property
    def inner(self) -> bool:
        """Whether this level stores the place inside a block (`mod`)."""
        return " mod " in self.expr

    def size(self, extent: int) -> int:
        """The number of coordinates of the level if its dimension has size `extent`. A block at the edge counts as whole."""
        return self.block if self.inner else -(-extent // self.block)

    def __str__(self) -> str:
        sizes = str(list(self.structured)) if self.structured else ""
        properties = ", ".join(name for name in PROPERTIES if getattr(self, name))
        return f"{self.expr} : {self.kind}{sizes}{f'({properties})' if properties else ''}"
