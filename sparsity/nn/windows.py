"""`Window` is the window of a convolution: it maps places of a grid to outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """A window with a number for each dimension.

    Output o reads input o * stride - padding + k * dilation for 0 <= k < kernel, as in torch.nn.functional.conv3d. If
    transposed, output i * stride - padding + k * dilation reads input i.
    """

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool = False

    @staticmethod
    def parse(numbers: Sequence[int]) -> "Window":
        """Returns the window with these `numbers`."""
        size = len(numbers) // 4
        kernel, stride, padding, dilation = (tuple(numbers[at : at + size]) for at in range(0, 4 * size, size))
        return Window(kernel, stride, padding, dilation, bool(numbers[-1]))

    @staticmethod
    def parse_several(numbers: Sequence[int], dimensions: int) -> tuple["Window", ...]:
        """Returns the windows whose numbers come one after the other."""
        each = 4 * dimensions + 1
        return tuple(Window.parse(numbers[at : at + each]) for at in range(0, len(numbers), each))

    @property
    def numbers(self) -> Sizes:
        """All fields as one tuple, the argument of operations."""
        return (*self.kernel, *self.stride, *self.padding, *self.dilation, int(self.transposed))

    @property
    def offsets(self) -> list[Sizes]:
        """The offsets k * dilation for every k, the last dimension fastest."""
        return [
            tuple(k * d for k, d in zip(ks, self.dilation, strict=True))
            for ks in product(*(range(size) for size in self.kernel))
        ]

    def shape_of(self, shape: Sequence[int]) -> Sizes:
        """Returns the shape of the outputs for a grid."""
        each = list(zip(shape, self.kernel, self.stride, self.padding, self.dilation, strict=True))
        if self.transposed:
            return tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in each)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each)

    def led_to(self, places: Tensor, dimension: int, size: int) -> list[Tensor]:
        """Returns the output of each tap along a dimension for these places, int64 [N]; -1 if it is none of `size` outputs."""
        stride, padding = self.stride[dimension], self.padding[dimension]
        found = []
        for k in range(self.kernel[dimension]):
            step = k * self.dilation[dimension]
            if self.transposed:
                at = places * stride + (step - padding)
                there = (at >= 0) & (at < size)
            else:
                moved = places + (padding - step)
                at = moved.div(stride, rounding_mode="floor") if stride > 1 else moved
                there = (at >= 0) & (at < size)
                there = there & (at * stride == moved) if stride > 1 else there
            found.append(at.where(there, -1))
        return found
