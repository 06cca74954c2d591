"""Converts arguments of constructors to tensors, formats and shapes. Errors name the expected type."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.sparsity.arrays.structure import INTEGERS

_NAMED = ("COO", "CSR", "CSC", "DCSR", "DCSC")


def tensor_of(given: Any, what: str) -> Tensor:
    """Returns a tensor, or makes one of numbers in lists or of a NumPy array."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, list | tuple | int | float | complex | np.ndarray):
        try:
            return torch.as_tensor(given)
        except (TypeError, ValueError) as problem:
            raise FormatError(f"{what} must be a tensor: {problem}") from problem
    raise FormatError(f"{what} must be a tensor, a list of numbers or a NumPy array, got {type(given).__name__}")


def format_of(given: Any) -> Format:
    """Returns a Format, or the one with a name such as "CSR" (in any case), or the one that an encoding's text describes."""
    if isinstance(given, Format):
        return given
    if isinstance(given, str):
        found: Format = getattr(Format, given.upper()) if given.upper() in _NAMED else Format.parse(given)
        return found
    names = ", ".join(f"Format.{name}" for name in _NAMED)
    raise FormatError(f"the format must be a Format, such as {names} or Format.bsr(4, 4), got {type(given).__name__}")


def arrays_of(format: Any, components: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the arrays of a SparseTensor. FormatError if there are none, or the format is no Format."""
    if not isinstance(format, Format) or not components:
        raise FormatError(
            f"SparseTensor(format, shape, arrays) puts arrays together, got {type(format).__name__}: use "
            "SparseTensor.from_torch, from_scipy or from_dense for what holds them, from_edge_index for edges, and from_parts "
            "for arrays to be checked"
        )
    return components


def shape_of(given: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple. FormatError for anything but a sequence of integers."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise FormatError(f"the shape must be a tuple of integers, got {given!r}")
    if not all(isinstance(extent, int | np.integer | torch.SymInt) for extent in given):
        raise FormatError(f"the shape must be a tuple of integers, got {tuple(given)}")
    extents: list[Any] = [extent if isinstance(extent, torch.SymInt) else int(extent) for extent in given]
    return tuple(extents)


def with_widths_of(format: Format, arrays: dict[str, list[Tensor]]) -> Format:
    """Returns the format with the integer widths of the arrays, where it gives no widths itself."""
    widths = {"positions": format.pos_width, "coordinates": format.crd_width}
    for kind, given in arrays.items():
        types = {array.dtype for array in given}
        if not types <= set(INTEGERS.values()) or len(types) > 1:
            found = ", ".join(map(str, types))
            raise FormatError(f"{kind} must be of one type, int32 or int64 (or 8 and 16 bits), got {found}: convert with .to()")
        if types and not widths[kind] and types != {torch.int64}:
            widths[kind] = types.pop().itemsize * 8
    return format.with_widths(widths["positions"], widths["coordinates"])


def listed(given: Any, what: str, count: int) -> list[Tensor]:
    """Returns the arrays of the levels as a list, also if there is one array. `count` is the number of arrays wanted."""
    several = isinstance(given, list | tuple) and not any(map(_is_number, given)) and (len(given) > 0 or count == 0)
    return [_integers(each, what) for each in (given if several else [given])]


def _is_number(given: Any) -> bool:
    return isinstance(given, int | np.integer) or (isinstance(given, Tensor) and not given.dim())


def _integers(given: Any, what: str) -> Tensor:
    """Does `tensor_of`, with integers for an empty list."""
    empty = isinstance(given, list | tuple) and not given
    return torch.empty(0, dtype=torch.int64) if empty else tensor_of(given, what)


def parts_of(
    format: Any, shape: Any, positions: Any, coordinates: Any, values: Any
) -> tuple[Format, tuple[int, ...], list[Tensor]]:
    """Returns the arguments of from_parts as a format, a shape, and the arrays in the order of `format.components()`."""
    format, shape = format_of(format), shape_of(shape)
    kinds = [kind for _, kind in format.components()]
    given_arrays = {"positions": positions, "coordinates": coordinates}
    arrays = {kind: listed(given, kind, kinds.count(kind)) for kind, given in given_arrays.items()}
    values = tensor_of(values, "values")
    format = with_widths_of(format, arrays)
    for kind, given in arrays.items():
        if kinds.count(kind) != len(given):
            raise FormatError(f"{format.name} has {kinds.count(kind)} arrays of {kind}, got {len(given)}")
    return format, shape, [*(arrays[kind].pop(0).contiguous() for kind in kinds[:-1]), values.contiguous().flatten()]
