"""Packings of weights whose values are integers of a few bits, times scales."""

from dataclasses import dataclass
from typing import ClassVar

from gossamer.dialects.packing_base import Component, Packing


@dataclass(frozen=True)
class Groups(Packing):
    """Groups of 16 neighbours along K, stored where one of them is nonzero: integers of `bits`, and a scale for each group.

    An entry has 16 bytes: a group of 8 bits, or two of 4 bits, the first in the lower halves of the bytes, all of them with a
    sign. `positions` say where the entries of each row begin, `coordinates` in which column each group begins, `scales` are
    f32. Where a row has an odd number of groups of 4 bits, one of zeros follows, that begins behind all columns of the tensor.
    What is at the edge of the tensor is filled up with zeros.
    """

    kind: ClassVar[str] = "groups"
    COLUMNS: ClassVar[int] = 16
    WIDEST: ClassVar[int] = (1 << 16) - COLUMNS
    coded: ClassVar[int] = 2
    bits: int

    def __post_init__(self) -> None:
        self._check((self.bits in (4, 8), "bits must be 4 or 8"))

    @property
    def neighbours(self) -> int:
        return self.COLUMNS

    @property
    def together(self) -> int:
        """Groups of an entry."""
        return 8 // self.bits

    def components(self) -> tuple[Component, ...]:
        arrays = Component("positions", 32), Component("coordinates", 16), Component("scales", 32)
        return *arrays, Component("values", 8)
