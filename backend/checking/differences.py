"""Measures how far values of a compiled graph are from torch's own."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.torch_internals import is_traceable_wrapper_subclass

_CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference that counts as equal, as a share of the largest value."""


def close(dtype: torch.dtype) -> float:
    """Returns the largest difference that counts as equal for a type, as a share of the largest value."""
    part = dtype.to_real() if dtype.is_complex else dtype
    return _CLOSE.get(part, torch.finfo(part).eps if part.is_floating_point else 0.0)


_CANCELLED = 1e-2
"""A gradient smaller than this share of the largest one may be a sum that cancels, such as of a bias before a batch norm. Then
its difference is divided by this share of the largest gradient."""


def difference(found: Any, expected: Any, usual: float = 0.0) -> float:
    """Returns the largest difference as a share of the largest expected value, or of `usual` if that is larger.

    Returns infinity if sizes or types differ, or if only one side has a NaN or an infinity somewhere. Integers and booleans are
    equal (0) or not (infinity).
    """
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return 0.0 if type(found) is type(expected) and found == expected else float("inf")
    if is_traceable_wrapper_subclass(expected):
        (names, format_), (others, other) = _flat(expected), _flat(found)
        if type(found) is not type(expected) or names != others or format_ != other:
            return float("inf")
        return max((difference(getattr(found, name), getattr(expected, name), usual) for name in names), default=0.0)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not is_inexact(expected):
        return 0.0 if torch.equal(found, expected) else float("inf")
    return _of_floats(found.detach(), expected.detach(), usual)


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor has floats or complex numbers, whose results are rounded."""
    return tensor.is_floating_point() or tensor.is_complex()


def _flat(value: Any) -> tuple[list[str], object]:
    """Returns the names of the arrays of a wrapper subclass, and its other state."""
    found: tuple[list[str], object] = value.__tensor_flatten__() if is_traceable_wrapper_subclass(value) else ([], None)
    return found


def _of_floats(found: Tensor, expected: Tensor, usual: float) -> float:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(
        found[~finite].nan_to_num(), expected[~finite].nan_to_num()
    ):
        return float("inf")
    found, expected = found[finite], expected[finite]
    if not expected.numel():
        return 0.0
    largest = max(float(expected.abs().max()), usual)
    return float((found - expected).abs().max()) / (largest or 1.0)


def apart(names: Sequence[str], found: Sequence[Any], expected: Sequence[Any]) -> list[tuple[str, float]]:
    """Returns the names of values that differ by more than rounding, each with its difference."""
    return _apart(names, found, expected, 0.0)


def gradients_apart(names: Sequence[str], found: Sequence[Any], expected: Sequence[Any]) -> list[tuple[str, float]]:
    """Returns the same for the gradients of one backward pass."""
    floats = [each for each in expected if isinstance(each, Tensor) and not is_traceable_wrapper_subclass(each)]
    largest = [float(each.abs().max()) for each in floats if each.numel()]
    finite = [each for each in largest if isfinite(each)]
    return _apart(names, found, expected, _CANCELLED * max(finite, default=0.0))


def _apart(names: Sequence[str], found: Sequence[Any], expected: Sequence[Any], usual: float) -> list[tuple[str, float]]:
    differences = [difference(ours, theirs, usual) for ours, theirs in zip(found, expected, strict=True)]
    limits = [close(each.dtype) if isinstance(each, Tensor) else 0.0 for each in expected]
    return [each for each, most in zip(zip(names, differences, strict=True), limits, strict=True) if not each[1] <= most]
