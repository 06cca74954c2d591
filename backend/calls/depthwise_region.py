"""What runs where a depthwise convolution was, with the elementwise work that follows it.

    gossamer::region([x [N, C, H, W], w [C, taps], *extras], key) -> [N, C, H', W']

Extras are as those of `convolved_region`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from gossamer.backend.calls.convolved_region import Shapes, pixels, slid_over
from gossamer.backend.devices.kernel import Kernel, allocate
from gossamer.dialects.window import Window
from gossamer.runtime.region_kernel import RegionKernel


@dataclass(frozen=True, eq=False)
class DepthwiseRegion:
    """A depthwise convolution that can run, of images of any size."""

    kernel: RegionKernel
    window: Window
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shapes", Shapes(self._shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return DepthwiseRegion, (self.kernel, self.window, self.dtype)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The only one."""
        return (self.kernel,)

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes of the result for this first operand."""
        return self._shape(x.shape)

    def _shape(self, given: torch.Size) -> tuple[int, ...]:
        return given[0], given[1], *slid_over(self.window, given)

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor:
        x, w, *extras = operands
        shape, strides, read, written, (_, *sizes) = self._shapes[x.shape]  # type: ignore[attr-defined]
        out = allocate(shape, strides, self.dtype)
        if out.numel():
            weight = w if w.is_contiguous() else w.contiguous()
            others = [pixels(extra, written) for extra in extras]
            self.kernel([pixels(x, read), weight, *others, *sizes], out.view(written))
        return out
