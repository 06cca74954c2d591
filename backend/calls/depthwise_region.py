"""What runs where a depthwise convolution was, with the elementwise work that follows it.

    gossamer::region([x [N, C, H, W], w [C, taps], *extras], key) -> [N, C, H', W']

Extras are as those of `convolved_region`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gossamer.backend.calls.convolved_region import OnImages, slid_over


@dataclass(frozen=True, eq=False)
class DepthwiseRegion(OnImages):
    """A depthwise convolution that can run, of images of any size."""

    dims: ClassVar[int] = 2

    def _shape(self, given: torch.Size) -> tuple[int, ...]:
        return given[0], given[1], *slid_over(self.window, given)

    def __call__(self, operands: list[torch.Tensor]) -> torch.Tensor:
        x, w, *extras = operands
        return self.computed(x, w if w.is_contiguous() else w.contiguous(), extras)
