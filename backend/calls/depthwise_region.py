"""What runs where a depthwise convolution was, with the elementwise work that follows it.

    gossamer::region([x [N, C, H, W], w [C, taps], *extras], key) -> [N, C, H', W']

Extras are as those of `convolved_region`.
"""

from dataclasses import dataclass

import torch

from gossamer.backend.calls.convolved_region import pixels
from gossamer.backend.devices.kernel import Kernel, allocate, contiguous_strides
from gossamer.dialects.window import Window


@dataclass(frozen=True, eq=False)
class DepthwiseRegion:
    """A depthwise convolution that can run, of images of any size."""

    kernel: Kernel
    window: Window
    dtype: torch.dtype

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The only one."""
        return (self.kernel,)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes of the result for this first operand."""
        return x.shape[0], x.shape[1], *self.window.output(*_sizes(x))[4 - x.dim() :]

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor:
        x, w, *extras = operands
        shape = self.shape(x)
        out = allocate(shape, contiguous_strides(shape), self.dtype)
        if out.numel():
            self.kernel([pixels(x), w.contiguous(), *map(pixels, extras), *_sizes(x)], out.flatten(2))
        return out


def _sizes(x: torch.Tensor) -> tuple[int, int]:
    """Height and width of images; rows of pixels are images of height 1."""
    return (x.shape[2], x.shape[3]) if x.dim() == 4 else (1, x.shape[2])
