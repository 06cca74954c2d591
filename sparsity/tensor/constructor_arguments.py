"""What users give for a tensor, a format or a shape: taken as torch takes it, or the error says what is wanted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format

_NAMED = ("COO", "CSR", "CSC", "DCSR", "DCSC")


def tensor_of(given: Any, what: str) -> Tensor:
    """A tensor, or one of what torch.tensor takes: numbers in lists, NumPy arrays."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, list | tuple | int | float | complex | np.ndarray):
        try:
            return torch.as_tensor(given)
        except (TypeError, ValueError) as problem:
            raise FormatError(f"{what} must be a tensor: {problem}") from problem
    raise FormatError(f"{what} must be a tensor, a list of numbers or a NumPy array, got {type(given).__name__}")


def format_of(given: Any) -> Format:
    """A Format, or the one of a name such as "CSR" or of an encoding's text."""
    if isinstance(given, Format):
        return given
    if isinstance(given, str):
        found: Format = getattr(Format, given) if given in _NAMED else Format.parse(given)
        return found
    names = ", ".join(f"Format.{name}" for name in _NAMED)
    raise FormatError(f"the format must be a Format, such as {names} or Format.bsr(4, 4), got {type(given).__name__}")


def shape_of(given: Any) -> tuple[int, ...]:
    """A shape."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise FormatError(f"the shape must be a tuple of integers, got {given!r}")
    if not all(isinstance(extent, int | np.integer | torch.SymInt) for extent in given):
        raise FormatError(f"the shape must be a tuple of integers, got {tuple(given)}")
    extents: list[Any] = [extent if isinstance(extent, torch.SymInt) else int(extent) for extent in given]
    return tuple(extents)
