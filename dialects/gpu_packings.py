"""Packings for GPU kernels: in the order of the lanes of a warp, or in the layout of sparse tensor cores."""

from dataclasses import dataclass
from typing import ClassVar

from gossamer.dialects.packing_base import Component, Packing


@dataclass(frozen=True)
class TwoFour(Packing):
    """2 of every 4 neighbours of a row, in the layout of sparse tensor cores.

    `metadata` has two bits for the place of each value in its group of four, in words for the lanes of a warp (see
    runtime/packers/two_four.py). Values lie row by row. Rows are padded to a multiple of 128, columns to one of 64.
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
    """V:N:M of VENOM: a strip of `rows` rows has nonzeros in 4 columns of every `group`, and each of its rows in 2 of these.

    `places` has for each column of a strip its number among the 4 of its group, or 255 (`NONE`). `metadata` and `values` are a
    `TwoFour` of the 4 columns of each group. Rows are padded to a multiple of 128, columns to one of 16 groups.
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
    """A bit for each element, and the nonzeros, in the order in which the lanes of a warp hold them for tensor cores.

    A panel is 32 x 32 elements, in 2 x 2 tiles of 16 x 16; panels are stored row by row. Half a warp holds rows 0 to 3 of every
    8, the other half rows 4 to 7. So a tile has eight masks of 4 rows x 8 columns: for each half, those of the upper left,
    lower left, upper right and lower right quarter. `positions` say where the values of each panel begin, in pieces of 8
    (`PIECE`). `offsets` say where the values of each mask begin in their panel.
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
    """`Fragments` of int8: a bit for each quad (four neighbours along K), and the quads that have a nonzero.

    A panel is 32 x 64 elements, in 2 x 2 tiles of 16 x 32. A tile has four masks of 8 rows x 4 quads, a bit for each lane of a
    warp: its upper left, lower left, upper right and lower right quarter. Offsets count quads; a piece has 4 of them.
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

    Rows are sorted by length. 16 rows make a slice, padded to its longest row. The warps of a thread block share the steps of a
    slice evenly. In a warp, two neighbouring lanes have consecutive parts of a row. A step has 16 entries of each lane. A
    distance has 4 or 8 bits; stored zeros bridge longer gaps.

    rows       for each row of a slice, its row in the matrix; M if it has none
    positions  the first step of each slice
    starts     the column from which each lane starts, by slice, warp and lane
    deltas     by steps, 16 distances of each lane. With 4 bits, entries 0 to 3 (and 8 to 11) are in the low halves of bytes,
               the four after them in the high halves.
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
