"""How long torch's own convolutions take here: timed once for a shape, and kept on disk.

What they cost beyond their arithmetic differs by shape and machine: a call takes 60 us on one Xeon, images of few channels or
single pixels go by other kernels, and what follows is a pass over the result.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import fastest, random
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime.elements import FLOATS

_ROUNDS = 3


def torch_us(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: object) -> float | None:
    """Microseconds for images and kernels of these shapes, channels innermost, and a relu of the result.

    how    stride, padding, dilation, whether transposed, output padding, groups: as of aten.convolution

    None where nothing may be measured (GOSSAMER_CALIBRATE=0).
    """
    if not CALIBRATE.get():
        return None
    images, *image = x
    lists = tuple(tuple(each) if isinstance(each, list | tuple) else each for each in how)
    return images * _of_one_image(tuple(image), tuple(w), dtype, lists, torch.get_num_threads())


@lru_cache(maxsize=1024)
def _of_one_image(
    image: tuple[int, ...], w: tuple[int, ...], dtype: torch.dtype, how: tuple[object, ...], threads: int
) -> float:
    def measure() -> float:
        innermost = torch.channels_last if len(image) == 3 else torch.contiguous_format
        x = random(1, *image, dtype=dtype).contiguous(memory_format=innermost)
        weight = random(*w, dtype=dtype)

        def run() -> torch.Tensor:
            return torch.ops.aten.convolution(x, weight, None, *how).relu_()

        with torch.no_grad():
            return fastest({"torch": run}, threads, _ROUNDS)["torch"]

    return kept("convolution", [image, w, FLOATS[dtype], how, threads], measure)
