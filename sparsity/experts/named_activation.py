"""Finds the name of an activation by its results for numbers of all sizes, however the model spells it."""

from collections.abc import Sequence
from math import inf, nan

import torch
from torch import Tensor

from gossamer.runtime.experts.activations import ACTIVATIONS, CLAMPED, LAYOUTS, LIMIT, activated

_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
"""Tolerances for float64. Another activation would differ by far more for some numbers."""

_LARGEST = 38  # decimal exponent of the largest float32
_SPECIAL = (0.0, nan, inf, -inf, LIMIT, -LIMIT)  # where spellings of an activation may differ in values or slopes
_EVERY = 31
_STEEP = 100.0  # beyond, slopes of some spellings are not finite
_OF_SLOPES = 1e-6  # their tolerance


def numbers(shape: Sequence[int]) -> Tensor:
    """Returns float64 numbers of both signs, from very small to very large, most of them about 1, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64)
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * 8 - 4
    exponents = torch.where(torch.rand(shape, generator=generator) < 0.2, exponents / 4 * _LARGEST, exponents)
    made = torch.where(torch.rand(shape, generator=generator) < 0.5, wide * 3, wide.sign() * 10.0**exponents)
    for place, number in enumerate(_SPECIAL):
        made.view(-1)[place::_EVERY] = number
    return made


def named(found: Tensor, given: Tensor, layouts: Sequence[str] = LAYOUTS) -> tuple[str, str] | None:
    """Returns the activation and layout (names of `activations.py`) that compute `found` from `given`, None if none does."""
    for layout in layouts:
        for activation in (*ACTIVATIONS, CLAMPED):
            if activation == CLAMPED and layout == "up":
                continue
            expected = activated(given, activation, layout)
            if expected.numel() == found.numel() and _same(found.reshape(expected.shape), expected):
                return activation, layout
    return None


def moderate(given: Tensor) -> Tensor:
    """Returns numbers at which all spellings of an activation have finite slopes."""
    return given.nan_to_num(0.0).clamp(-_STEEP, _STEEP)


def same_slopes(found: Tensor, given: Tensor, activation: str, layout: str) -> bool:
    """Whether the gradient of `found` with respect to moderate numbers is that of a named activation."""
    if not found.requires_grad:
        return False
    expected = activated(given, activation, layout)
    ours, theirs = (torch.autograd.grad(value.sum(), given)[0] for value in (found, expected))
    return torch.allclose(ours, theirs, rtol=_OF_SLOPES, atol=_OF_SLOPES)


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(found, expected, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True))
