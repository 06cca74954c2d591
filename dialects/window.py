"""What a convolution slides over its images.

An output pixel (i, j) reads at (i s, j s) and, for each tap, so many rows and columns further. Images are read as if they had
zeros around and, for a stride of s, lay in s x s phases: phase (a, b) holds the pixels (i s + a, j s + b). Then the pixels that
a tap reads for neighbouring outputs are neighbours, too, and where all rows of a phase lie behind each other, so are those of
the next row: output pixel q = i `row` + j reads at q + shift.

A tile of outputs is cut from an image in one of three ways. Of a `pointwise` window, and of images whose sizes are known, it is
a row of outputs; in the latter those with j past the width of the result are no pixels. Where sizes are open, it is a strip,
which is an image of its own: so many rows of so many vectors, and what is read for it has rows of its own length. So it is too,
where each column of taps has a phase of its own (`across`): images are held several times then, but what any tap reads begins
with a vector, and none of those lies in two cache lines.

Volumes are images in a row: what taps read of a channel at several depths counts as several channels.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from math import prod
from typing import Any

Pair = tuple[int, int]
"""Along height and width."""

Sizes = tuple[int, int, int]
"""Along depth, height and width; images have a depth of 1, rows of pixels a height of 1, too."""

_ONES: Sizes = (1, 1, 1)
_NONE: Sizes = (0, 0, 0)


@dataclass(frozen=True)
class Window:
    """What a convolution slides over images, and how its kernel cuts them.

    kernel, stride, dilation   as torch has them
    before, after              zeros around the images: in front, above and left; behind, below and right
    images                     their depth, height and width; zeros where they are known at run time
    groups                     of channels, as torch has them
    channels                   how many are multiplied before the next ones, so that what is read of them stays in the cache
    vectors                    of output pixels in registers
    across                     how many of them are in a row of a tile where columns of taps have phases of their own; else 0
    """

    kernel: Sizes = _ONES
    stride: Sizes = _ONES
    dilation: Sizes = _ONES
    before: Sizes = _NONE
    after: Sizes = _NONE
    images: Sizes = _NONE
    groups: int = 1
    channels: int = 1
    vectors: int = 4
    across: int = 0

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Window":
        """The inverse of `numbers`."""
        sizes = [(numbers[at], numbers[at + 1], numbers[at + 2]) for at in range(0, 18, 3)]
        return cls(*sizes, *numbers[18:])  # type: ignore[arg-type]

    @property
    def numbers(self) -> list[int]:
        """All of it, as an attribute holds it."""
        return [number for field in astuple(self) for number in (field if isinstance(field, tuple) else (field,))]

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel reads the input pixel in its place alone."""
        return self.kernel == self.stride == _ONES and self.before == self.after == _NONE

    @property
    def flat(self) -> bool:
        """Whether it is known that all pixels have the depth 0."""
        return (self.images[0], self.kernel[0], self.before[0], self.after[0]) == (1, 1, 0, 0)

    @property
    def strip(self) -> Pair | None:
        """Rows, and vectors in each of them, of a tile that is an image of its own."""
        if self.across:
            return self.vectors // self.across, self.across
        if self.pointwise or self.images != _NONE:
            return None
        return (1, self.vectors) if self.kernel[1] == 1 else (self.vectors, 1)

    def in_tiles(self, lanes: int) -> bool:
        """Whether it is pointwise, and its images are known to be whole tiles."""
        return self.pointwise and self.images != _NONE and prod(self.images) % (self.vectors * lanes) == 0

    @property
    def taps(self) -> int:
        """Places of the kernel."""
        return self.kernel[0] * self.kernel[1] * self.kernel[2]

    def output(self, *images: Any) -> tuple[Any, ...]:
        """Depth, height and width of the result for images of this size."""
        sizes = zip(images, self.kernel, self.stride, self.dilation, self.before, self.after, strict=True)
        return tuple((n + b + a - d * (k - 1) - 1) // s + 1 for n, k, s, d, b, a in sizes)

    def row(self, lanes: int) -> int:
        """Pixels from one row of a phase to the next."""
        if self.strip is None:
            return -(-(self.before[2] + self.images[2] + self.after[2]) // self.stride[2])
        if self.across:
            return self.across * lanes
        halo = self.dilation[2] * (self.kernel[2] - 1) // self.stride[2]
        return -(-(self.strip[1] * lanes + halo) // lanes) * lanes

    def places(self, lanes: int) -> list[tuple[Pair, int]]:
        """The phase that each tap of an image reads, and its shift."""
        high, wide, row = *self.stride[1:], self.row(lanes)
        if self.across:
            return [((i % high, j), i // high * row) for i, j in self._reached]
        return [((i % high, j % wide), i // high * row + j // wide) for i, j in self._reached]

    @cached_property
    def phases(self) -> list[Pair]:
        """Those that taps read."""
        return sorted({(i % self.stride[1], j if self.across else j % self.stride[2]) for i, j in self._reached})

    @cached_property
    def _reached(self) -> list[Pair]:
        """How many rows and columns each tap of an image reads further."""
        down, across = (range(0, d * k, d) for d, k in zip(self.dilation[1:], self.kernel[1:], strict=True))
        return [(i, j) for i in down for j in across]

    def vectors_of(self, phase: Pair, lanes: int) -> int:
        """Those of a phase that taps read for a tile of outputs; what is behind them is not packed."""
        last = max(shift for place, shift in self.places(lanes) if place == phase)
        return -(-(last + max(self.offsets(lanes)) + lanes) // lanes)

    def width(self, lanes: int) -> int:
        """Pixels of a phase that a tile of outputs reads, whole vectors."""
        if self.strip is not None:
            halo = self.dilation[1] * (self.kernel[1] - 1) // self.stride[1]
            return (self.strip[0] + halo) * self.row(lanes)
        halo = 0 if self.pointwise else max(shift for _, shift in self.places(lanes))
        return -(-(self.vectors * lanes + halo) // lanes) * lanes

    def rows_of(self, lanes: int) -> int:
        """How many rows of a phase a vector of outputs can lie in, where sizes are known."""
        return (lanes - 2) // self.row(lanes) + 2

    def gathers(self, lanes: int) -> bool:
        """Whether the pixels of a phase are read one by one: they are further apart than two, or lie in many rows."""
        if self.across:
            return self.stride[2] > 2
        return self.stride[1:] != (1, 1) and (self.strip is not None or self.stride[2] > 2 or self.rows_of(lanes) > 3)

    def offsets(self, lanes: int) -> list[int]:
        """Where each vector of outputs lies in a tile, as its phases have it."""
        down, across = self.strip or (1, self.vectors)
        row = self.row(lanes) if self.strip else 0
        return [i * row + j * lanes for i in range(down) for j in range(across)]

    @property
    def span(self) -> int:
        """Outputs from the first to the last pixel of an image of known size, those that are no pixels included."""
        _, high, wide = self.output(*self.images)
        return int((high - 1) * self.row(1) + wide)
