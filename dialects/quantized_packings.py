"""Packings of weights whose values are integers of a few bits, times scales."""

from dataclasses import dataclass
from typing import ClassVar, Self

from gossamer.dialects.packing_base import Component, Packing


@dataclass(frozen=True)
class Groups(Packing):
    """Groups of 16 neighbours along K, stored where one of them is nonzero: integers of `bits`, and a scale for each group,
    a bfloat16 where `scale` is 16, a float32 where it is 32.

    Rows are sorted by their groups, within blocks of 128, into strips of 16, filled up to as many groups as their fullest row
    has. An entry is two groups of a row; a line is one of each row of a strip. `positions` say where the lines of each strip
    begin, `order` the place of each row in its block, `coordinates`, of `places` bits, the number of each group in its row,
    `scales` a pair an entry, of bf16 the first in the lower half. Of 4 bits an entry has 16 bytes, the first group in their
    lower halves; of 8 bits 32, one group after the other; all with a sign. Groups that fill up are zeros behind all columns of
    the tensor. What is at the edge of the tensor is filled up with zeros.
    """

    kind: ClassVar[str] = "groups"
    COLUMNS: ClassVar[int] = 16
    ROWS: ClassVar[int] = 16
    BLOCK: ClassVar[int] = 128
    TOGETHER: ClassVar[int] = 2
    """Groups of an entry."""
    WIDEST: ClassVar[int] = COLUMNS * ((1 << 16) - 1)
    coded: ClassVar[int] = 2
    bits: int
    places: int
    scale: int

    def __post_init__(self) -> None:
        self._check(
            (self.bits in (4, 8), "bits must be 4 or 8"),
            (self.places in (8, 16), "places must be 8 or 16"),
            (self.scale in (16, 32), "scale must be 16 or 32"),
        )

    @classmethod
    def for_columns(cls, reduction: int, bits: int, scale: int, columns: int) -> Self:
        """With the fewest bits that can tell where the groups of so many columns, and one behind them, begin."""
        return cls(reduction, bits, 8 if columns <= cls.COLUMNS * ((1 << 8) - 1) else 16, scale)

    @property
    def neighbours(self) -> int:
        return self.COLUMNS

    def components(self) -> tuple[Component, ...]:
        arrays = Component("positions", 32), Component("order", 8), Component("coordinates", self.places)
        return *arrays, Component("scales", 32), Component("values", 8)
