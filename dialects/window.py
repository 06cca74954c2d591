"""Describes the window that a convolution slides over its images, and how a kernel cuts images into tiles of outputs.

With a stride of s, output pixel (i, j) reads an input pixel for each tap: (i s, j s), and others some rows and columns further.
Images are read as if they were surrounded by zeros and split into s x s phases: phase (a, b) has the pixels
(i s + a, j s + b). So the pixels that a tap reads for neighbouring outputs are neighbours in a phase. If the rows of a phase
are contiguous, this also holds across rows: output pixel q = i `row` + j reads at q + shift.

A tile of outputs has one of these shapes:

a row of outputs  for a `pointwise` window, and for images of known sizes. For the latter, outputs with j past the width of the
                  result are no pixels.
a strip           if sizes are not known: some rows of some vectors. The pixels that it reads are packed as an image of its own,
                  with its own row length.
a strip           if each column of taps has its own phase (`across`). Then images are stored several times, but the pixels that
                  a tap reads begin at a whole vector, and no vector lies in two cache lines.

Volumes are rows of images: the pixels of a channel that taps read at several depths count as several channels.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from math import prod
from typing import Any

Pair = tuple[int, int]
"""Sizes or places along height and width."""

Sizes = tuple[int, int, int]
"""Sizes along depth, height and width. Images have depth 1; one-dimensional signals also have height 1."""

_ONES: Sizes = (1, 1, 1)
_NONE: Sizes = (0, 0, 0)


@dataclass(frozen=True)
class Window:
    """The window of a convolution, and how its kernel cuts images into tiles.

    kernel, stride, dilation   as in torch
    before, after              rows and columns of zeros around the images: in front, above, left; and behind, below, right
    images                     depth, height and width of the images; zeros if they are only known at run time
    groups                     groups of channels, as in torch
    channels                   number of channels multiplied before the next ones, so that their pixels stay in the cache
    vectors                    vectors of output pixels in a tile, whose sums are in registers
    across                     vectors in a row of a tile if each column of taps has its own phase; else 0
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
        """Returns the window that has these `numbers`."""
        sizes = [(numbers[at], numbers[at + 1], numbers[at + 2]) for at in range(0, 18, 3)]
        return cls(*sizes, *numbers[18:])  # type: ignore[arg-type]

    @property
    def numbers(self) -> list[int]:
        """All fields as one list, for an attribute."""
        return [number for field in astuple(self) for number in (field if isinstance(field, tuple) else (field,))]

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel reads only the input pixel at its own place."""
        return self.kernel == self.stride == _ONES and self.before == self.after == _NONE

    @property
    def flat(self) -> bool:
        """Whether all pixels are known to have depth 0."""
        return (self.images[0], self.kernel[0], self.before[0], self.after[0]) == (1, 1, 0, 0)

    @property
    def strip(self) -> Pair | None:
        """Rows of a tile that is a strip, and vectors in each row; None for other tiles."""
        if self.across:
            return self.vectors // self.across, self.across
        if self.pointwise or self.images != _NONE:
            return None
        return (1, self.vectors) if self.kernel[1] == 1 else (self.vectors, 1)

    def in_tiles(self, lanes: int) -> bool:
        """Whether it is pointwise, and the sizes of images are known and a multiple of a tile."""
        return self.pointwise and self.images != _NONE and prod(self.images) % (self.vectors * lanes) == 0

    @property
    def taps(self) -> int:
        """Number of taps of the kernel."""
        return self.kernel[0] * self.kernel[1] * self.kernel[2]

    def output(self, *images: Any) -> tuple[Any, ...]:
        """Returns depth, height and width of the result for images of this size."""
        sizes = zip(images, self.kernel, self.stride, self.dilation, self.before, self.after, strict=True)
        return tuple((n + b + a - d * (k - 1) - 1) // s + 1 for n, k, s, d, b, a in sizes)

    def row(self, lanes: int) -> int:
        """Returns the number of pixels from one row of a phase to the next."""
        if self.strip is None:
            return -(-(self.before[2] + self.images[2] + self.after[2]) // self.stride[2])
        if self.across:
            return self.across * lanes
        halo = self.dilation[2] * (self.kernel[2] - 1) // self.stride[2]
        return -(-(self.strip[1] * lanes + halo) // lanes) * lanes

    def places(self, lanes: int) -> list[tuple[Pair, int]]:
        """Returns the phase that each tap of an image reads, and its shift."""
        high, wide, row = *self.stride[1:], self.row(lanes)
        if self.across:
            return [((i % high, j), i // high * row) for i, j in self._reached]
        return [((i % high, j % wide), i // high * row + j // wide) for i, j in self._reached]

    @cached_property
    def phases(self) -> list[Pair]:
        """The phases that taps read."""
        return sorted({(i % self.stride[1], j if self.across else j % self.stride[2]) for i, j in self._reached})

    @cached_property
    def _reached(self) -> list[Pair]:
        """The distance of each tap from the first one, in rows and columns."""
        down, across = (range(0, d * k, d) for d, k in zip(self.dilation[1:], self.kernel[1:], strict=True))
        return [(i, j) for i in down for j in across]

    def vectors_of(self, phase: Pair, lanes: int) -> int:
        """Returns the vectors of a phase that taps read for a tile of outputs. Only these are packed."""
        last = max(shift for place, shift in self.places(lanes) if place == phase)
        return -(-(last + max(self.offsets(lanes)) + lanes) // lanes)

    def width(self, lanes: int) -> int:
        """Returns the pixels of a phase that a tile of outputs reads, rounded up to whole vectors."""
        if self.strip is not None:
            halo = self.dilation[1] * (self.kernel[1] - 1) // self.stride[1]
            return (self.strip[0] + halo) * self.row(lanes)
        halo = 0 if self.pointwise else max(shift for _, shift in self.places(lanes))
        return -(-(self.vectors * lanes + halo) // lanes) * lanes

    def rows_of(self, lanes: int) -> int:
        """Returns the most rows of a phase in which a vector of outputs can lie, for images of known sizes."""
        return (lanes - 2) // self.row(lanes) + 2

    def gathers(self, lanes: int) -> bool:
        """Whether the pixels of a phase are read one by one: the stride is more than 2, or a vector lies in many rows."""
        if self.across:
            return self.stride[2] > 2
        return self.stride[1:] != (1, 1) and (self.strip is not None or self.stride[2] > 2 or self.rows_of(lanes) > 3)

    def offsets(self, lanes: int) -> list[int]:
        """Returns the place of each vector of outputs of a tile, in pixels of its phases."""
        down, across = self.strip or (1, self.vectors)
        row = self.row(lanes) if self.strip else 0
        return [i * row + j * lanes for i in range(down) for j in range(across)]

    @property
    def span(self) -> int:
        """Number of outputs from the first to the last pixel of an image of known size, with those that are no pixels."""
        _, high, wide = self.output(*self.images)
        return int((high - 1) * self.row(1) + wide)
