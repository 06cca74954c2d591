"""What runs where a convolution was under schedule="reference": the matrix of what the window shows, and MLIR's sparsifier.

    gossamer::region([x [N, C, H, W], *leaves of the weight, *extras], key) -> [N, M, H', W']

What tests of the kernel compare it with on small images: the matrix has a row for each pixel of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.backend.calls.convolved_region import ConvolvedRegion
from gossamer.backend.devices.kernel import contiguous_strides
from gossamer.dialects.window import Window

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class ReferenceRegion(ConvolvedRegion):
    """A convolution of one group as a product of matrices."""

    def computed(self, x: Tensor, weight: Any, extras: Sequence[Tensor]) -> Tensor:
        shape = self.shape(x)
        result = torch.empty_strided((shape[0] * prod(shape[2:]), self.m), (self.m, 1), dtype=self.dtype)
        if result.numel():
            others = [extra.movedim(1, -1).reshape(-1, self.m).contiguous() if extra.dim() > 2 else extra for extra in extras]
            self.kernel([shown(x, self.window), weight, *others], result)
        images = result.view(shape[0], *shape[2:], self.m).movedim(-1, 1)
        return torch.empty_strided(shape, contiguous_strides(shape), dtype=self.dtype).copy_(images)


def shown(x: Tensor, window: Window) -> Tensor:
    """[pixels of the result, channels x taps]: what the window shows there of images [N, C, ...]."""
    dims = x.dim() - 2
    sizes = (window.kernel, window.stride, window.dilation, window.before, window.after)
    kernel, stride, dilation, before, after = (each[3 - dims :] for each in sizes)
    x = aten.constant_pad_nd(x, [n for sides in zip(before[::-1], after[::-1], strict=True) for n in sides])
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    order = [0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims)]
    channels = x.shape[1] * prod(kernel)
    return x.permute(order).reshape(-1, channels).contiguous()
