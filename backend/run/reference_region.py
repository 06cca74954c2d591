"""Runs a convolution under schedule="reference": unfolds the images into a matrix, and multiplies it by MLIR's sparsifier.

    gossamer::region([x [N, C, H, W], *leaves of the weight, *extras], key) -> [N, M, H', W']

Tests compare the kernels of convolutions with it on small images. The matrix has a row for each pixel of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.backend.devices.device_kernel import Kernel, contiguous_strides
from gossamer.backend.run.compiled_region import CompiledRegion
from gossamer.backend.run.layouts import Images, Shape
from gossamer.dialects.window import Window

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class ReferenceRegion:
    """A convolution of one group as a product of matrices. `region` multiplies; `layout` gives the sizes of the images."""

    region: CompiledRegion
    layout: Images

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the product."""
        return self.region.kernels

    def outputs(self, operands: Sequence[Tensor]) -> list[tuple[Shape, torch.dtype]]:
        """Returns the sizes and type of the result."""
        return self.layout.outputs(operands[0].shape)

    def __call__(self, operands: list[Tensor]) -> Tensor:
        ((shape, dtype),) = self.outputs(operands)
        out = torch.empty_strided(shape, contiguous_strides(shape), dtype=dtype, device=operands[0].device)
        if not out.numel():
            return out
        first = self.region.variants[0].others.start
        others = [extra.movedim(1, -1).reshape(-1, shape[1]) if extra.dim() > 2 else extra for extra in operands[first:]]
        result = self.region([shown(operands[0], self.layout.window), *operands[1:first], *others])
        return out.copy_(result.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1))


def shown(x: Tensor, window: Window) -> Tensor:
    """Returns the unfolded images [N, C, ...]: a matrix [pixels of the result, channels x taps] of the values in the window."""
    dims = x.dim() - 2
    sizes = (window.kernel, window.stride, window.dilation, window.before, window.after)
    kernel, stride, dilation, before, after = (each[3 - dims :] for each in sizes)
    x = aten.constant_pad_nd(x, [n for sides in zip(before[::-1], after[::-1], strict=True) for n in sides])
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    order = [0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims)]
    channels = x.shape[1] * prod(kernel)
    return x.permute(order).reshape(-1, channels).contiguous()
