"""How long torch's own convolutions take here: timed once for a shape, and kept on disk.

What they cost beyond their arithmetic differs by shape and machine: a call takes 60 us on one Xeon, images of few channels or
single pixels go by other kernels, and what follows is a pass over the result.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import Call, fastest, random
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime.elements import FLOATS

_ROUNDS = 3


def torch_us(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: object, planar: bool = False) -> float | None:
    """Microseconds for images and kernels of these shapes, and a relu of the result.

    how     stride, padding, dilation, whether transposed, output padding, groups: as of aten.convolution
    planar  whether pixels are innermost in images, in what is read and what is written; channels otherwise

    None where nothing may be measured (GOSSAMER_CALIBRATE=0).
    """
    if not CALIBRATE.get():
        return None
    images, *image = x
    return images * _of_one_image(tuple(image), tuple(w), dtype, _lists(how), torch.get_num_threads(), planar)


def torch_call(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: Any, planar: bool = False) -> Call:
    """What `torch_us` times."""
    images, weight = _images(x, dtype), random(*w, dtype=dtype)
    images = images.contiguous() if planar else images

    def run() -> torch.Tensor:
        result = torch.ops.aten.convolution(images, weight, None, *how).relu_()
        return result.contiguous() if planar else result

    return run


def filter_gradient_us(
    g: Sequence[int], x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: object, planar: bool = False
) -> float | None:
    """Microseconds for the gradient of kernels of this shape, for g and images of those; `how` is stride, padding, dilation and
    groups, and `planar` as above. None where nothing may be measured."""
    if not CALIBRATE.get():
        return None
    return _of_filters(tuple(g), tuple(x), tuple(w), dtype, _lists(how), torch.get_num_threads(), planar)


def _lists(how: Sequence[object]) -> tuple[object, ...]:
    return tuple(tuple(each) if isinstance(each, list | tuple) else each for each in how)


@lru_cache(maxsize=1024)
def _of_one_image(
    image: tuple[int, ...], w: tuple[int, ...], dtype: torch.dtype, how: tuple[object, ...], threads: int, planar: bool
) -> float:
    def measure() -> float:
        with torch.no_grad():
            return _undisturbed(torch_call((1, *image), w, dtype, *how, planar=planar), threads)

    return kept("planar-convolution" if planar else "convolution", [image, w, FLOATS[dtype], how, threads], measure)


@lru_cache(maxsize=1024)
def _of_filters(
    g: tuple[int, ...],
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: torch.dtype,
    how: tuple[Any, ...],
    threads: int,
    planar: bool,
) -> float:
    def measure() -> float:
        stride, padding, dilation, groups = how
        given, images, weight = _images(g, dtype), _images(x, dtype), random(*w, dtype=dtype)
        if planar:
            given, images = given.contiguous(), images.contiguous()
        more, wanted = [0] * len(stride), [False, True, False]

        def run() -> tuple[torch.Tensor, ...]:
            return torch.ops.aten.convolution_backward(
                given, images, weight, None, stride, padding, dilation, False, more, groups, wanted
            )

        with torch.no_grad():
            return _undisturbed(run, threads)

    return kept("planar-filter-gradient" if planar else "filter-gradient", [g, x, w, FLOATS[dtype], how, threads], measure)


def _undisturbed(run: Callable[[], object], threads: int) -> float:
    """Where another process has one of the cores, threads wait long for each other: there, one thread's time."""
    return min(fastest({"torch": run}, number, _ROUNDS)["torch"] for number in {1, threads})


def _images(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    innermost = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return random(*shape, dtype=dtype).contiguous(memory_format=innermost)
