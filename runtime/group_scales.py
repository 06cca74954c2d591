"""Finds integers of a few bits and a scale that give groups of float32 back bit for bit, from the floats alone.

    element = integer x scale, rounded to float32       integers from -2^(bits - 1) to 2^(bits - 1) - 1

The largest element of a group is n times the scale, for some integer n. Each other element is a fraction of the largest one,
and the fraction's denominator divides n. A table gives the denominator of each fraction. So n is a multiple of the greatest
denominator, and mostly equal to it. The scale is the largest element divided by n, or a neighbouring float, because that
element has been rounded. A scale is accepted only if it gives all elements of the group back.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_STEPS = 1 << 16
"""Steps of the table of fractions from 0 to 1. Fractions with denominators up to 128 are at least four steps apart, and a
rounded fraction is at most one step off."""

_AT_ONCE = 1 << 14
"""Groups that are processed together, so that they stay in the cache. If a matrix has no scales, the first groups mostly show
it.
"""


def scaled(groups: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Returns the scales [groups] of type `dtype`, and the integers [groups, elements] of int8; None if some group has none.

    The scale of a group of zeros is 1.
    """
    found = []
    for some in groups.split(_AT_ONCE):
        if (each := _scaled(some, bits, dtype)) is None:
            return None
        found.append(each)
    scales, integers = map(torch.cat, zip(*found, strict=True))
    return scales, integers


def _scaled(groups: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    most = 1 << bits - 1
    extremes = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    extremes.masked_fill_(extremes == 0, 1)
    fractions = (groups / extremes).abs_().mul_(_STEPS).round_().nan_to_num_(0).int()
    least = _denominators(most).index_select(0, fractions.flatten()).view(groups.shape).amax(1, keepdim=True).int()
    scales, integers = torch.empty_like(extremes, dtype=dtype), torch.empty_like(groups, dtype=torch.int8)
    left, times = torch.arange(len(groups)), 0
    while len(left):
        times += 1
        if times * int(least.max()) > most:
            return None
        for beside in (0, 1, -1):
            n = times * least
            scale = extremes / torch.where(n < most, n, -n)
            scale = (scale.view(torch.int32) + beside).view(torch.float32)
            found = (groups / scale).round_().clamp_(-most, most - 1)
            fits = (found * scale == groups).all(1) & (scale.to(dtype) == scale).flatten()
            scales[left[fits]], integers[left[fits]] = scale[fits].to(dtype), found[fits].to(torch.int8)
            left, groups, extremes, least = _taken((left, groups, extremes, least), ~fits)
    return scales.flatten(), integers


def _taken(tensors: Sequence[Tensor], mask: Tensor) -> list[Tensor]:
    return [tensor[mask] for tensor in tensors]


@cache
def _denominators(most: int) -> Tensor:
    """Returns the denominator of the fraction at each step; `most` + 1 at steps without a fraction."""
    table = torch.full((_STEPS + 1,), most + 1, dtype=torch.uint8)
    for denominator in range(most, 0, -1):  # the reduced fraction is written last, and stays
        steps = (torch.arange(denominator + 1) * (_STEPS / denominator)).round().int()
        for beside in (-1, 0, 1):
            table[(steps + beside).clamp(0, _STEPS)] = denominator
    return table
