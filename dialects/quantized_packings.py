"""Packings of quantized weights, whose values are integers of a few bits times scales."""

from dataclasses import dataclass
from typing import ClassVar, Self

from gossamer.dialects.packing_base import Component, Packing


@dataclass(frozen=True)
class Groups(Packing):
    """Groups of 16 neighbours along K, stored if one of them is nonzero: integers of `bits` bits, and a scale for each group, a
    bfloat16 if `scale` is 16, a float32 if it is 32.

    Within blocks of 128, rows are sorted by their number of groups into strips of 16, which are padded to their fullest row. An
    entry is two groups of a row. A line has one entry of each row of a strip.

    positions    the first line of each strip
    order        the place of each row in its block
    coordinates  the number of each group in its row, in `places` bits
    scales       a pair for each entry; of two bf16 the first is in the lower half
    values       signed integers. With 4 bits an entry has 16 bytes, the first group in their lower halves. With 8 bits it has
                 32 bytes, one group after the other.

    Padding groups are zeros and lie behind all columns of the tensor. Elements beyond the edge of the tensor are zeros.
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
        """Returns the packing with the fewest bits for the coordinates of all groups of `columns` columns and of padding."""
        return cls(reduction, bits, 8 if columns <= cls.COLUMNS * ((1 << 8) - 1) else 16, scale)

    @property
    def neighbours(self) -> int:
        return self.COLUMNS

    def components(self) -> tuple[Component, ...]:
        arrays = Component("positions", 32), Component("order", 8), Component("coordinates", self.places)
        return *arrays, Component("scales", 32), Component("values", 8)
