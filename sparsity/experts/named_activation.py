"""Finds the name of an activation by its results for numbers of all sizes, however the model spells it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.runtime.experts.activations import ACTIVATIONS, CLAMPED, LAYOUTS, activated

_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
"""Tolerances for float64. Another activation would differ by far more for some numbers."""


def numbers(shape: Sequence[int]) -> Tensor:
    """Returns float64 numbers of both signs, from very small to very large, most of them about 1."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64)
    large = 10.0 ** (torch.rand(shape, generator=generator, dtype=torch.float64) * 8 - 4)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, wide * 3, wide.sign() * large)


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


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(found, expected, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True))
