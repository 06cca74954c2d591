"""Measures how long torch's convolutions take on this machine, once for a shape. Times are kept on disk.

Arithmetic alone does not tell. A call takes 60 us on one Xeon. Torch has other kernels for images with few channels or single
pixels. The activation that follows is another pass over the result.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import Call, fastest, random
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime.elements import FLOATS

_ROUNDS = 3


def torch_us(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: object, planar: bool = False) -> float | None:
    """Returns the microseconds of a convolution and a relu of its result. `x` and `w` are the shapes of images and filters.

    how     stride, padding, dilation, transposed, output padding and groups, as in aten.convolution
    planar  whether pixels are innermost in images that are read and written (NCHW), not channels

    Returns None if Gossamer may not measure (GOSSAMER_CALIBRATE=0).
    """
    images, *image = x
    us = _us("convolution", (image, w), dtype, how, planar)
    return None if us is None else images * us


def filter_gradient_us(
    g: Sequence[int], x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: object, planar: bool = False
) -> float | None:
    """Returns the same for gradients of filters. `g` is the incoming gradient; `how`: stride, padding, dilation, groups."""
    return _us("filter-gradient", (g, x, w), dtype, how, planar)


def torch_call(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: Any, planar: bool = False) -> Call:
    """Returns the call that `torch_us` times."""
    images, weight = _images(x, dtype, planar), random(*w, dtype=dtype)

    def run() -> torch.Tensor:
        result = torch.ops.aten.convolution(images, weight, None, *how).relu_()
        return result.contiguous() if planar else result

    return run


def _filter_gradient_call(
    g: Sequence[int], x: Sequence[int], w: Sequence[int], dtype: torch.dtype, *how: Any, planar: bool
) -> Call:
    (*windows, groups), given = how, (_images(g, dtype, planar), _images(x, dtype, planar), random(*w, dtype=dtype))
    more, wanted = [0] * len(windows[0]), [False, True, False]
    return partial(torch.ops.aten.convolution_backward, *given, None, *windows, False, more, groups, wanted)


def _us(what: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, how: Sequence[object], planar: bool) -> float | None:
    if not CALIBRATE.get():
        return None
    lists = tuple(tuple(each) if isinstance(each, list | tuple) else each for each in how)
    return _timed(what, tuple(map(tuple, shapes)), dtype, lists, torch.get_num_threads(), planar)


@lru_cache(maxsize=2048)
def _timed(
    what: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, how: tuple[Any, ...], threads: int, planar: bool
) -> float:
    def measure() -> float:
        if what == "convolution":
            image, w = shapes
            call = torch_call((1, *image), w, dtype, *how, planar=planar)
        else:
            g, x, w = shapes
            call = _filter_gradient_call(g, x, w, dtype, *how, planar=planar)
        with torch.no_grad():
            return _undisturbed(call, threads)

    return kept(f"planar-{what}" if planar else what, [*shapes, FLOATS[dtype], how, threads], measure)


def _undisturbed(run: Callable[[], object], threads: int) -> float:
    """Returns the lesser time of `threads` and one thread. Several threads wait long if another process has a core."""
    return min(fastest({"torch": run}, number, _ROUNDS)["torch"] for number in {1, threads})


def _images(shape: Sequence[int], dtype: torch.dtype, planar: bool) -> torch.Tensor:
    innermost = torch.channels_last if len(shape) == 4 and not planar else torch.contiguous_format
    return random(*shape, dtype=dtype).contiguous(memory_format=innermost)
