"""Checks that arrays are well-formed: that they store a tensor of a shape in a format. Kernels rely on this check.

A kernel uses positions and coordinates without checks, so all arrays from outside are checked here once. An error is a
FormatError that names the level, the entry and the value, and says what to do.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.dialects.level import Level
from gossamer.runtime.modules import sizes as known_sizes

_AT_ONCE = 1 << 20  # entries whose order is checked at once, to bound the memory of the check

INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64, 0: torch.int64}


def check(format: Format, shape: Sequence[int], components: Sequence[Tensor]) -> None:
    """FormatError unless the components are well-formed: lengths, types, bounds, order, no duplicates."""
    _check_arrays(format, components)
    sizes = check_sizes(format, shape)
    check_lengths(format, shape, components)
    arrays = dict(zip(format.components(), components, strict=True))
    parents, at = 1, 0  # entries of the level above
    while at < len(format.levels):
        level, end = format.levels[at], at + 1
        if level.kind == "dense":
            parents *= sizes[at]
        elif level.structured:
            parents *= level.structured[0]
            crd = _coordinates(level, arrays[at, "coordinates"], sizes[at])
            _check_order([level], [crd], torch.arange(0, parents + 1, level.structured[0], device=crd.device))
        else:
            while end < len(format.levels) and format.levels[end].kind == "singleton":
                end += 1
            levels = format.levels[at:end]
            found = [arrays[number, "coordinates"] for number in range(at, end) if (number, "coordinates") in arrays]
            if len(found) < len(levels):
                found = list(found[0].unbind(1))
            entries = found[0].numel()
            starts = _starts(level, _unsigned(arrays[at, "positions"]), parents, entries)
            crds = [_coordinates(*each) for each in zip(levels, found, sizes[at:end], strict=True)]
            _check_order(levels, crds, starts)
            parents = entries
        at = end


def check_lengths(format: Format, shape: Sequence[int], components: Sequence[Tensor]) -> None:
    """FormatError unless the lengths of the arrays fit together. It does not read their contents."""
    arrays, entries = dict(zip(format.components(), components, strict=True)), 1  # entries of the levels so far
    for number, (level, size) in enumerate(zip(format.levels, format.level_sizes(shape), strict=True)):
        positions, coordinates = arrays.get((number, "positions")), arrays.get((number, "coordinates"))
        if positions is not None:
            length = 2 * entries if level.kind == "loose_compressed" else entries + 1
            if positions.shape != (length,):
                raise FormatError(f"positions of '{level}' must be {length} numbers, got {list(positions.shape)}")
        if coordinates is not None:
            together = sharing(format, number)
            if together > 1 and (coordinates.dim() != 2 or coordinates.shape[1] != together):
                found = list(coordinates.shape)
                raise FormatError(f"coordinates of '{level}' are interleaved, must be [entries, {together}], got {found}")
            if positions is not None:
                entries = coordinates.numel() // together
            elif level.structured:
                entries *= level.structured[0]
            if coordinates.shape != ((entries, together) if together > 1 else (entries,)):
                raise FormatError(f"coordinates of '{level}' must be {entries} numbers, got {list(coordinates.shape)}")
        elif level.kind == "dense":
            entries *= size
    if components[-1].numel() != entries:
        raise FormatError(
            f"{format.name} of shape {tuple(shape)} stores {entries} values here, got {components[-1].numel()}: give that many"
        )


def sharing(format: Format, number: int) -> int:
    """Returns how many levels store their coordinates in the array of this level."""
    count = 1
    while number + count < len(format.levels) and format.levels[number + count].kind == "singleton":
        if format.levels[number + count].soa:
            return 1
        count += 1
    return count


def check_levels(format: Format) -> None:
    """FormatError for levels that a SparseTensor cannot have. Operations rely on entries that are in order and occur once."""
    for level, below in pairwise((*format.levels, None)):
        assert level is not None
        if level.kind == "batch":
            raise FormatError(f"'{level}': write a batch as a dense level, `d{level.dim} : dense`")
        if level.nonordered:
            raise FormatError(
                f"'{level}': the entries of a SparseTensor are in order; leave out `nonordered`, and sort given arrays "
                "(torch's coalesce(), SciPy's sort_indices())"
            )
        if level.nonunique and (below is None or below.kind != "singleton"):
            raise FormatError(
                f"'{level}': each entry of a SparseTensor occurs once, so only a level above a singleton can be nonunique; "
                "leave it out, and sum duplicates first (torch's coalesce(), SciPy's sum_duplicates())"
            )


def check_sizes(format: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of the levels.

    FormatError as in `check_levels`, and if coordinates do not fit their width, or 64 bits cannot count places.
    """
    check_levels(format)
    if any(extent < 0 for extent in shape):
        raise FormatError(f"the shape {tuple(shape)} has a negative size: sizes must be 0 or more")
    sizes = format.level_sizes(shape)
    if prod(shape) >= 1 << 63 or prod(sizes) >= 1 << 63:
        raise FormatError(f"a tensor of shape {tuple(shape)} has more places than 64 bits can number: split it")
    for level, size in zip(format.levels, sizes, strict=True):
        if level.kind != "dense" and size > _numbers(format.crd_width):
            raise FormatError(
                f"'{level}': coordinates up to {size - 1} do not fit {format.crd_width} bits, "
                f"use format.with_widths({format.pos_width}, {_width_for(size - 1)})"
            )
    return sizes


def with_room(format: Format, shape: Sequence[int]) -> Format:
    """Returns the format, with wider coordinates if this shape needs them. A graph checks open sizes when it runs."""
    widths = [32, 64] if format.crd_width in (8, 16, 32) else []
    for level, size in zip(format.levels, format.level_sizes(shape), strict=True):
        while widths and level.kind != "dense" and not known_sizes.guard_or_true(size <= _numbers(format.crd_width)):
            format = format.with_widths(format.pos_width, widths.pop(0))
    return format


def check_count(format: Format, level: Level, count: int) -> None:
    """FormatError if positions up to `count` do not fit their width."""
    if count >= _numbers(format.pos_width):
        raise FormatError(
            f"'{level}': positions up to {count} do not fit {format.pos_width} bits, "
            f"use format.with_widths({_width_for(count)}, {format.crd_width})"
        )


def _check_arrays(format: Format, components: Sequence[Tensor]) -> None:
    wanted = format.components()
    if len(components) != len(wanted):
        names = ", ".join(kind if kind == "values" else f"{kind} of '{format.levels[at]}'" for at, kind in wanted)
        raise FormatError(f"{format.name} is stored in {len(wanted)} arrays ({names}), got {len(components)}")
    widths = {"positions": format.pos_width, "coordinates": format.crd_width}
    for (at, kind), array in zip(wanted, components, strict=True):
        place = kind if kind == "values" else f"{kind} of '{format.levels[at]}'"
        if kind in widths and array.dtype != INTEGERS[widths[kind]]:
            raise FormatError(f"{place} are {array.dtype}, the format says {INTEGERS[widths[kind]]}: convert them with .to()")
        if not array.is_contiguous():
            raise FormatError(f"{place} are not contiguous: call .contiguous()")
        if array.device != components[-1].device:
            raise FormatError(f"{place} are on {array.device}, the values on {components[-1].device}: move them with .to()")


def _starts(level: Level, positions: Tensor, parents: int, entries: int) -> Tensor:
    """Returns where the entries of each parent start, and where the last ones end, after checks."""
    if level.kind == "loose_compressed":
        gaps = (positions[2::2] != positions[1:-1:2]).nonzero()
        if gaps.numel():
            raise FormatError(
                f"positions of '{level}' leave a gap after entry {int(positions[1 + 2 * int(gaps[0])])}: close it"
            )
        positions = torch.cat([positions[:1], positions[1::2]]) if parents else positions.new_zeros(1)
    if positions[0] != 0:
        raise FormatError(f"positions of '{level}' start at {int(positions[0])}, must start at 0")
    falls = (positions[1:] < positions[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0])
        raise FormatError(
            f"positions of '{level}' fall from {int(positions[at])} to {int(positions[at + 1])} at {at + 1}, must ascend"
        )
    if positions[-1] != entries:
        raise FormatError(
            f"positions of '{level}' end at {int(positions[-1])}, but there are {entries} coordinates: both must be equal"
        )
    return positions


def _coordinates(level: Level, given: Tensor, size: int) -> Tensor:
    """Returns the coordinates of a level as comparable numbers, after a check of their bounds."""
    coordinates = _unsigned(given)
    if coordinates.numel():
        least, most = (int(bound) for bound in torch.aminmax(coordinates))
        if least < 0 or most >= size:
            wrong = least if least < 0 else most
            at = int((coordinates == wrong).nonzero()[0])
            raise FormatError(f"coordinates of '{level}' must be in [0, {size}), number {at} is {wrong}")
    return coordinates


def _check_order(levels: Sequence[Level], coordinates: Sequence[Tensor], starts: Tensor) -> None:
    """FormatError unless entries ascend lexicographically under each parent, strictly down to the last unique level."""
    pairs = coordinates[0].numel() - 1
    for first in range(0, pairs, _AT_ONCE):  # in parts, because the comparison needs memory
        last = min(first + _AT_ONCE, pairs)
        bounds = torch.searchsorted(starts, starts.new_tensor([first + 1, last + 1])).tolist()
        begins = torch.zeros(last - first, dtype=torch.bool, device=starts.device)
        begins[starts[slice(*bounds)].long() - (first + 1)] = True
        _check_pairs(levels, [crd[first : last + 1] for crd in coordinates], begins, first)


def _check_pairs(levels: Sequence[Level], coordinates: Sequence[Tensor], begins: Tensor, first: int) -> None:
    """Checks each entry from number `first` on against the next one, unless the next has another parent."""
    fine, equal = begins, torch.ones_like(begins)
    for level, crd in zip(levels, coordinates, strict=True):
        fine = fine | (equal & (crd[1:] > crd[:-1]))
        equal = equal & (crd[1:] == crd[:-1])
        twice = (equal & ~begins & (not level.nonunique)).nonzero()
        if twice.numel():
            at = first + int(twice[0])
            raise FormatError(
                f"entries {at} and {at + 1} of '{level}' have the same coordinate {int(crd[twice[0]])}: "
                "sum duplicates first (torch's coalesce(), SciPy's sum_duplicates())"
            )
    wrong = (~(fine | equal)).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        before, after = ([int(crd[n]) for crd in coordinates] for n in (at, at + 1))
        raise FormatError(
            f"coordinates of '{levels[0]}' are not in order: entry {first + at} is at {before}, entry {first + at + 1} at "
            f"{after}; sort them (torch's coalesce(), SciPy's sort_indices())"
        )


def _unsigned(array: Tensor) -> Tensor:
    """Returns the numbers as kernels read them: 8 and 16 bits as unsigned."""
    if array.dtype in (torch.int8, torch.int16):
        return array.to(torch.int32) & (0xFF if array.dtype == torch.int8 else 0xFFFF)
    return array


def _numbers(width: int) -> int:
    """Returns the number of values from 0 on that an integer of this width has. 8 and 16 bits are unsigned, others signed."""
    return 1 << (width if width in (8, 16) else (width or 64) - 1)


def _width_for(number: int) -> int:
    return next(width for width in (8, 16, 32, 64) if number < _numbers(width))
