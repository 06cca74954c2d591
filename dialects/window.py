"""What a convolution slides over its images.

An output pixel (i, j) reads at (i s, j s) and, for each tap, so many rows and columns further. Images are read as if they had
zeros around and, for a stride of s, lay in s x s phases: phase (a, b) holds the pixels (i s + a, j s + b). Then the pixels that
a tap reads for neighbouring outputs are neighbours, too, and where all rows of a phase lie behind each other, so are those of
the next row: output pixel q = i `row` + j reads at q + shift. Outputs with j past the width of the result are no pixels.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

Pair = tuple[int, int]
"""Along height and width."""


@dataclass(frozen=True)
class Window:
    """What a convolution slides over images, and how its kernel cuts them.

    kernel, stride, dilation   as torch has them
    before, after              zeros around the images: above and left, below and right
    images                     their height and width; (0, 0) where they are known at run time, which is for `pointwise` alone
    channels                   how many are multiplied before the next ones, so that what is read of them stays in the cache
    vectors                    of output pixels in registers
    """

    kernel: Pair
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    before: Pair = (0, 0)
    after: Pair = (0, 0)
    images: Pair = (0, 0)
    channels: int = 1
    vectors: int = 4

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Window":
        """The inverse of `numbers`."""
        kernel, stride, dilation, before, after, images = ((numbers[at], numbers[at + 1]) for at in range(0, 12, 2))
        return cls(kernel, stride, dilation, before, after, images, numbers[12], numbers[13])

    @property
    def numbers(self) -> list[int]:
        """All of it, as an attribute holds it."""
        return [number for field in astuple(self) for number in (field if isinstance(field, tuple) else (field,))]

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel reads the input pixel in its place alone."""
        return self.kernel == self.stride == (1, 1) and self.before == self.after == (0, 0)

    @property
    def taps(self) -> int:
        """Places of the kernel."""
        return self.kernel[0] * self.kernel[1]

    def output(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Height and width of the result for images of this size."""
        sizes = zip((height, width), self.kernel, self.stride, self.dilation, self.before, self.after, strict=True)
        high, wide = ((n + b + a - d * (k - 1) - 1) // s + 1 for n, k, s, d, b, a in sizes)
        return high, wide

    @property
    def row(self) -> int:
        """Pixels from one row of a phase to the next."""
        return -(-(self.before[1] + self.images[1] + self.after[1]) // self.stride[1])

    @cached_property
    def places(self) -> list[tuple[Pair, int]]:
        """The phase that each tap reads, and its shift."""
        across = [(j * self.dilation[1]) for j in range(self.kernel[1])]
        down = [(i * self.dilation[0]) for i in range(self.kernel[0])]
        high, wide = self.stride
        return [((i % high, j % wide), i // high * self.row + j // wide) for i in down for j in across]

    @cached_property
    def phases(self) -> list[Pair]:
        """Those that taps read."""
        return sorted({phase for phase, _ in self.places})

    def width(self, lanes: int) -> int:
        """Pixels of a phase that a tile of outputs reads, whole vectors."""
        halo = 0 if self.pointwise else max(shift for _, shift in self.places)
        return -(-(self.vectors * lanes + halo) // lanes) * lanes

    @property
    def span(self) -> int:
        """Outputs from the first to the last pixel of an image, those that are no pixels included."""
        high, wide = self.output(*self.images)
        return int((high - 1) * self.row + wide)
