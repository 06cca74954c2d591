"""Packings that kernels of GPUs read: in the order of the lanes of a warp, or as their sparse tensor cores take a weight."""

from dataclasses import dataclass
from typing import ClassVar

from gossamer.dialects.packing_base import Component, Packing


@dataclass(frozen=True)
class TwoFour(Packing):
    """2 of every 4 neighbours of a row, as the sparse tensor cores of GPUs take them.

    `metadata` has two bits for the place of each value in its group of four, in words for the lanes of a warp (see
    runtime/packers/two_four.py). Values lie row by row. Rows are filled up to 128, columns to 64.
    """

    kind: ClassVar[str] = "twofour"
    ROWS: ClassVar[int] = 128
    COLUMNS: ClassVar[int] = 64

    def __post_init__(self) -> None:
        self._check()

    def components(self) -> tuple[Component, ...]:
        return Component("metadata", 32), Component("values", 0)


@dataclass(frozen=True)
class Vnm(Packing):
    """V:N:M of VENOM: of every `group` columns, the 4 that a strip of `rows` rows has nonzeros in, and of these 2 in each row.

    `places` say of each column of a strip which of its group's 4 it is, 255 for none of them. The rest is a `TwoFour` of the
    columns that are left. Rows are filled up to 128, columns to 16 groups.
    """

    kind: ClassVar[str] = "vnm"
    GROUPS: ClassVar[int] = TwoFour.COLUMNS // 4
    NONE: ClassVar[int] = 255
    rows: int
    group: int

    def __post_init__(self) -> None:
        self._check((self.rows in (64, 128), "rows must be 64 or 128"), (self.group in (8, 16), "group must be 8 or 16"))

    def components(self) -> tuple[Component, ...]:
        return Component("places", 8), Component("metadata", 32), Component("values", 0)


@dataclass(frozen=True)
class Fragments(Packing):
    """A bit for each element and the nonzeros, in the order in which the lanes of a warp hold them for tensor cores.

    Panels of 32 x 32, row by row of panels, are 2 x 2 tiles of 16 x 16. A tile has eight masks of 4 rows x 8 columns: for each
    half of the warp, which has rows 0 to 3 or 4 to 7 of every 8, those of the upper left, lower left, upper right and lower
    right quarter. `positions` say where the values of each panel begin, in pieces of 8 (`PIECE`); `offsets` where those of each
    mask begin in their panel.
    """

    kind: ClassVar[str] = "fragments"
    ROWS: ClassVar[int] = 32
    COLUMNS: ClassVar[int] = 32
    LINES: ClassVar[int] = 4
    """Rows of a mask."""
    PIECE: ClassVar[int] = 8

    def __post_init__(self) -> None:
        self._check()

    def components(self) -> tuple[Component, ...]:
        return Component("positions", 32), Component("masks", 32), Component("offsets", 16), Component("values", 0)


@dataclass(frozen=True)
class QuadFragments(Fragments):
    """The same of int8: a bit for each quad, four neighbours along K, and the quads that have a nonzero.

    Panels of 32 x 64 are 2 x 2 tiles of 16 x 32. A tile has four masks of 8 rows x 4 quads, a bit for each lane of a warp: its
    upper left, lower left, upper right and lower right quarter. Values count in quads, pieces are 4 of them.
    """

    kind: ClassVar[str] = "quadfragments"
    COLUMNS: ClassVar[int] = 64
    LINES: ClassVar[int] = 8
    PIECE: ClassVar[int] = 4

    @property
    def neighbours(self) -> int:
        return 4


@dataclass(frozen=True)
class Deltas(Packing):
    """Nonzeros and their distances along the rows, for warps whose lanes walk along rows (MACKO: Macko and Boza, 2025).

    Rows are sorted by length. Each 16 of them are a slice, whose rows are filled up to the longest. The warps of a thread block
    share the steps of a slice evenly; in each, two neighbouring lanes have parts of a row that follow each other. A step has
    16 entries of each lane. A distance has 4 or 8 bits; stored zeros cross longer gaps.

    rows       the matrix's row for each row of a slice; M where there is none
    positions  where the steps of each slice begin
    starts     the column from which each lane starts, by slice, warp and lane
    deltas     16 distances of each lane, by steps. Of 4 bits, those of entries 0 to 3 (and 8 to 11) are the low halves of
               bytes, those of the four after them the high halves.
    values     by steps: 8 entries of each lane, then the other 8
    """

    kind: ClassVar[str] = "deltas"
    ROWS: ClassVar[int] = 16
    WARPS: ClassVar[int] = 8
    PARTS: ClassVar[int] = 32 // ROWS
    ENTRIES: ClassVar[int] = 16
    bits: int

    def __post_init__(self) -> None:
        self._check((self.bits in (4, 8), "bits must be 4 or 8"))

    @property
    def longest(self) -> int:
        """The longest distance."""
        return (1 << self.bits) - 1

    def components(self) -> tuple[Component, ...]:
        before = Component("rows", 32), Component("positions", 32), Component("starts", 16)
        return *before, Component("deltas", 32), Component("values", 0)
