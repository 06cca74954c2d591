"""Converts stored entries to coordinates and back, for any format.

coordinates   the arrays of a format → the coordinates of each stored value
assemble      coordinates and values, in any order → the arrays of a format
locate        coordinates → the numbers of the values that a tensor stores there
"""

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format, Level
from gossamer.sparsity.arrays.sorting import sort_keys
from gossamer.sparsity.arrays.structure import INTEGERS, check_count, check_sizes

_DENSE = 4  # coordinates per entry up to which a counting sort is used

Pack = Callable[[Format, tuple[int, ...], list[Tensor], Tensor], tuple[list[Tensor], Tensor]]
PACKS: dict[tuple[Level, ...], Pack] = {}
"""The functions of users' formats that add entries to store, see extension.register_format."""


def stores_fill(format: Format) -> bool:
    """Whether the format stores padding zeros: in blocks, dense levels below sparse ones, N:M groups, or by its `pack`."""
    if format.levels in PACKS:
        return True
    sparse = [number for number, level in enumerate(format.levels) if level.kind != "dense"]
    return not sparse or sparse[-1] + 1 < len(format.levels) or format.levels[-1].structured is not None


def blocked(format: Format) -> bool:
    """Whether stored values may lie outside the shape, in blocks at the edge."""
    return any(level.block > 1 for level in format.levels)


def within(shape: Sequence[int], at: Sequence[Tensor]) -> Tensor:
    """Returns which of the coordinates lie within the shape."""
    return reduce(torch.logical_and, [crd < extent for crd, extent in zip(at, shape, strict=True)])


def block_sizes(format: Format, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of the dense levels below the last sparse one: each entry stores a block of values.

    A dimension that is one single block has only the size of the block.
    """
    if format.levels[-1].kind != "dense":
        return ()
    first = max((n + 1 for n, level in enumerate(format.levels) if level.kind != "dense"), default=0)
    below = list(zip(format.levels, format.level_sizes(shape), strict=True))[first:]
    return tuple(size for level, size in below if size != 1 or level.inner or level.block == 1)


def coordinates(format: Format, shape: Sequence[int], components: Sequence[Tensor]) -> list[Tensor]:
    """Returns the coordinates of all stored values in each dimension (int64). Padding of edge blocks is outside the shape."""
    arrays = dict(zip(format.components(), components, strict=True))
    device = components[-1].device
    sizes = format.level_sizes(shape)
    levels: list[Tensor] = []  # of the entries so far
    entries = 1
    interleaved: list[Tensor] = []
    for number, level in enumerate(format.levels):
        if level.kind == "singleton":
            crd = interleaved.pop(0) if interleaved else arrays[number, "coordinates"]
        elif level.kind == "dense":
            levels = [each.repeat_interleave(sizes[number]) for each in levels]
            crd = torch.arange(sizes[number], device=device).repeat(entries)
        elif level.structured:
            levels = [each.repeat_interleave(level.structured[0]) for each in levels]
            crd = arrays[number, "coordinates"]
        else:
            positions = as_int64(arrays[number, "positions"])
            counts = positions[1::2] - positions[::2] if level.kind == "loose_compressed" else positions.diff()
            levels = [each.repeat_interleave(counts) for each in levels]
            crd = arrays[number, "coordinates"]
            if crd.dim() == 2:
                crd, *interleaved = crd.unbind(1)
        entries = crd.numel()
        levels.append(as_int64(crd))
    dims = [torch.zeros(entries, dtype=torch.int64, device=device) for _ in range(format.rank)]
    for level, crd in zip(format.levels, levels, strict=True):
        dims[level.dim] = dims[level.dim].add_(crd, alpha=1 if level.inner else level.block)
    return dims


def assemble(format: Format, shape: Sequence[int], at: Sequence[Tensor], values: Tensor) -> tuple[Tensor, ...]:
    """Returns the arrays that store `values` at coordinates `at` (int64, within the shape, any order). Duplicates are summed.

    It is differentiable in the values. FormatError if the format cannot store them.
    """
    sizes = check_sizes(format, shape)
    pack = PACKS.get(format.levels)
    if pack is not None:
        at, values = pack(format, tuple(shape), list(at), values)
    linear, order = _in_order(format, sizes, at)
    values = values if order is None else values.index_select(0, order)
    block = prod(block_sizes(format, shape))
    entries = linear // block if block > 1 else linear
    leaves = torch.unique_consecutive(entries)
    arrays, stored = _walk(format, sizes, leaves)
    if block == 1 and stored.numel() == values.numel() == leaves.numel():
        return (*arrays, values.contiguous())
    places = torch.searchsorted(stored, entries) * block + linear % block
    return (*arrays, values.new_zeros(stored.numel() * block).index_add(0, places, values))


def locate(format: Format, shape: Sequence[int], components: Sequence[Tensor], at: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the number of the stored value at each of the coordinates, and whether there is one (else any number)."""
    sizes = format.level_sizes(shape)
    stored = _linear(format, sizes, coordinates(format, shape, components))
    wanted = _linear(format, sizes, at)
    if not stored.numel():
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    order = None
    if not bool((stored[1:] >= stored[:-1]).all()):
        stored, order = stored.sort()
    found = torch.searchsorted(stored, wanted).clamp_(max=stored.numel() - 1)
    there = stored[found] == wanted
    return (found if order is None else order[found]), there


def _in_order(format: Format, sizes: Sequence[int], at: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Returns a number for each entry, ascending in storage order, and the order of the entries, None if they are in order."""
    linear = _linear(format, sizes, at)
    if bool((linear[1:] >= linear[:-1]).all()):
        return linear, None
    if max(sizes) > _DENSE * linear.numel():
        return linear.sort(stable=True)
    order = None  # sorts by one level after the other, the last one first
    for level, size in reversed(list(zip(format.levels, sizes, strict=True))):
        keys = _level(level, at)
        _, by_level = sort_keys(keys if order is None else keys.index_select(0, order), size, torch.int64)
        if by_level is not None:
            order = by_level if order is None else order.index_select(0, by_level)
    assert order is not None
    return linear.index_select(0, order), order


def _linear(format: Format, sizes: Sequence[int], at: Sequence[Tensor]) -> Tensor:
    """Returns a number for each entry, which ascends in storage order."""
    linear = torch.zeros_like(at[0])
    for level, size in zip(format.levels, sizes, strict=True):
        linear = linear.mul_(size).add_(_level(level, at))
    return linear


def _level(level: Level, at: Sequence[Tensor]) -> Tensor:
    """Returns the coordinates of a level."""
    crd = at[level.dim]
    return crd % level.block if level.inner else crd // level.block if level.block > 1 else crd


def _walk(format: Format, sizes: Sequence[int], leaves: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns the positions and coordinates of ascending entries of the last sparse level, and the entries that are stored."""
    last = max((number + 1 for number, level in enumerate(format.levels) if level.kind != "dense"), default=0)
    arrays: list[Tensor] = []
    stored = leaves.new_zeros(1)
    at = 0
    while at < last:
        level, end = format.levels[at], at + 1
        if level.kind == "dense":
            stored = (stored[:, None] * sizes[at] + torch.arange(sizes[at], device=leaves.device)).flatten()
        elif level.structured:
            stored = _fill_groups(format, leaves, stored.numel(), sizes[at])
            arrays.append((stored % max(sizes[at], 1)).to(INTEGERS[format.crd_width]))
        else:
            while end < last and format.levels[end].kind == "singleton":
                end += 1
            below, span = prod(sizes[end:last]), prod(sizes[at:end])
            entries = leaves if below <= 1 else torch.unique_consecutive(leaves // below)
            arrays.append(_positions(format, at, entries // max(span, 1), stored))
            arrays += _coordinates(format, sizes, entries, at, end)
            stored = entries
        at = end
    return arrays, stored


def _positions(format: Format, at: int, parents: Tensor, stored: Tensor) -> Tensor:
    count = parents.numel()
    check_count(format, format.levels[at], count)
    edges = torch.cat([torch.searchsorted(parents, stored), stored.new_full((1,), count)])
    if format.levels[at].kind == "loose_compressed":
        edges = torch.stack([edges[:-1], edges[1:]], 1).flatten()
    return edges.to(INTEGERS[format.pos_width])


def _coordinates(format: Format, sizes: Sequence[int], entries: Tensor, at: int, end: int) -> list[Tensor]:
    """Returns an array for each of the levels at..end, or one array [entries, levels] if they are interleaved."""
    arrays = []
    for number in range(at, end):
        below = prod(sizes[number + 1 : end])
        prefixes = entries // below if below > 1 else entries
        level = format.levels[number]
        if number + 1 < end and not level.nonunique:
            twice = (prefixes[1:] == prefixes[:-1]).nonzero()
            if twice.numel():
                coordinate = int(prefixes[twice[0]]) % sizes[number]
                raise FormatError(f"'{level}' needs the coordinate {coordinate} twice: make the level nonunique")
        arrays.append((prefixes % max(sizes[number], 1)).to(INTEGERS[format.crd_width]))
    if end == at + 1 or format.levels[at + 1].soa:
        return arrays
    return [torch.stack(arrays, 1)]


def _fill_groups(format: Format, leaves: Tensor, groups: int, size: int) -> Tensor:
    """Returns the n entries that each group of an N:M format stores: its nonzeros, padded with its first zeros."""
    structured = format.levels[-1].structured
    assert structured
    n, m = structured
    occupied = torch.zeros(groups * size, dtype=torch.bool, device=leaves.device)
    occupied = occupied.index_fill_(0, leaves, True).view(groups, size)
    spare = n - occupied.sum(1)
    full = (spare < 0).nonzero()
    if full.numel():
        group = int(full[0])
        raise FormatError(
            f"{format.name} stores {n} of every {m} elements, but group {group} has {n - int(spare[group])} nonzeros: "
            f"prune to {n}:{m} or choose another format"
        )
    return (occupied | ((~occupied).cumsum(1) <= spare[:, None])).flatten().nonzero().flatten()


def as_int64(crd: Tensor) -> Tensor:
    """Returns coordinates as int64, as kernels read them: 8 and 16 bits as unsigned."""
    wide = crd.long()
    return wide & (0xFF if crd.dtype == torch.int8 else 0xFFFF) if crd.dtype in (torch.int8, torch.int16) else wide
