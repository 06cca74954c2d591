"""gossamer::max_pool(x, window) returns the maxima of windows, computed by torch's kernel for images with channels innermost.

x [N, C, H, W]    →    maxima [N, C, H', W'], and if `indices` the index of each in its channel [N, C, H', W'], int64, else [0]

Images beside sparse convolutions have pixels innermost. Inductor's loops over these compare one value after the other. On one
thread of an Intel Xeon (Emerald Rapids), microseconds of Inductor and of this operation, which copies images to and fro:

    images            window            with indices        without
    2x128x10x10       5x5               3,273 / 204         763 / 157
    8x64x56x56        3x3, step 2       34,032 / 5,503      4,525 / 4,445
    2x128x20x20       2x2, step 2       2,397 / 207         570 / 137
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.runtime.operations import Operation

aten = torch.ops.aten


def _on_cpu(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: bool,
) -> tuple[Tensor, Tensor]:
    given = x.contiguous(memory_format=torch.channels_last)
    maxima, places = aten.max_pool2d_with_indices(given, kernel, stride, padding, dilation, ceil_mode)
    return maxima.contiguous(), places.contiguous() if indices else places.new_empty(0)


max_pool = Operation(
    "max_pool(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode, bool indices)"
    " -> (Tensor, Tensor)",
    _on_cpu,
    fake=_on_cpu,
).register()
