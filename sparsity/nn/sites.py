"""`Sites` are the places of a grid that have features. This file finds the pairs of sites that a window connects.

The coordinates of a site are encoded as one number, the last dimension fastest, and the numbers are sorted once. An offset of a
window is a number, too. So the neighbours of all sites are found by one pass through the same sorted numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.dialects.points import TILE, MatchKeysOp
from gossamer.runtime.memory.warm_memory import empty
from gossamer.sparsity.compiler.op_kernels import run
from gossamer.sparsity.nn.windows import Sizes, Window

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Sites:
    """Some places of a batch of grids.

    shape      the shape of a grid; `batch` is the number of grids
    order      int32 [N], the rows of the user's indices in ascending order of coordinates
    places     int32 [N, 1 + D], the indices in that order
    ascending  whether the user's indices are in that order
    """

    shape: Sizes
    batch: int
    order: Tensor
    places: Tensor
    ascending: bool

    @staticmethod
    def of(indices: Tensor, shape: Sequence[int], batch: int) -> "Sites":
        """Returns the sites of int32 indices [N, 1 + D]. GossamerError if one is outside of the grids, or occurs twice."""
        sizes = (batch, *shape)
        _check_range(indices, sizes)
        keys = _numbers(indices, sizes)
        if bool((keys[1:] > keys[:-1]).all()):
            return Sites(tuple(shape), batch, _count(keys), indices.clone(), True)
        keys, order = keys.sort()
        repeated = keys[1:] == keys[:-1]
        if bool(repeated.any()):
            same = repeated.nonzero()
            first, second = sorted(order[int(same[0]) :][:2].tolist())
            raise GossamerError(
                f"indices: rows {first} and {second} are both {indices[first].tolist()}, {len(same)} rows repeat another: "
                "a place has one row of features; take the mean or the first of those that fall into it"
            )
        return Sites(tuple(shape), batch, order.int(), indices.index_select(0, order), False)

    def __len__(self) -> int:
        return len(self.places)

    def keys(self, margin: Sequence[int] | None = None) -> Tensor:
        """Returns the number of every site, ascending, in a grid with a margin behind each dimension."""
        margin = margin or [0] * len(self.shape)
        sizes = (self.batch, *(n + m for n, m in zip(self.shape, margin, strict=True)))
        _check_places(sizes)
        return _numbers(self.places, sizes)


def _count(like: Tensor) -> Tensor:
    """Returns 0, 1, ... as int32 [N], with the length and device of `like`."""
    return torch.arange(len(like), dtype=torch.int32, device=like.device)


def _check_places(sizes: Sizes) -> None:
    if prod(sizes) > 2**62:
        raise GossamerError(
            f"spatial_shape {list(sizes[1:])} of a batch of {sizes[0]} has more than 2**62 places: give a smaller one"
        )


def _check_range(indices: Tensor, sizes: Sizes) -> None:
    _check_places(sizes)
    if len(indices) > _MOST:
        raise GossamerError(f"indices: {len(indices)} rows, kernels take up to {_MOST}: make smaller batches")
    if not len(indices):
        return
    least, most = indices.amin(0).tolist(), indices.amax(0).tolist()
    if min(least) >= 0 and all(n < size for n, size in zip(most, sizes, strict=True)):
        return
    wrong = ((indices < 0) | (indices >= indices.new_tensor(sizes))).any(1).nonzero()
    row = int(wrong[0])
    raise GossamerError(
        f"indices: row {row} is {indices[row].tolist()}, must be at least 0 and below {list(sizes)} "
        f"(batch_size, then spatial_shape); {len(wrong)} of {len(indices)} rows are outside"
    )


def _numbers(places: Tensor, sizes: Sizes) -> Tensor:
    """Returns the sum of places[:, d] * (product of the sizes behind d), int64."""
    numbers = places[:, 0].long()
    for column, size in enumerate(sizes[1:], 1):
        numbers = torch.add(places[:, column], numbers, alpha=size)
    return numbers


@dataclass(frozen=True)
class PairMap:
    """The pairs of rows that each offset of a window connects, in the form for kernels (dialects/points.py).

    inputs, outputs  int32 [pairs], offset by offset: the rows to read and to write
    rows             int32 [output sites]: the output rows in ascending order of coordinates
    positions        int32 [offsets, tiles + 1]: where the pairs of each tile of outputs begin
    read             the number of input sites
    """

    inputs: Tensor
    outputs: Tensor
    rows: Tensor
    positions: Tensor
    read: int

    @property
    def bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(each.nbytes for each in (self.inputs, self.outputs, self.rows, self.positions))


Ranks = tuple[Tensor, Tensor]
"""The pairs of an offset: inputs and outputs as places in the sorted order of sites, both ascending, int32."""


def pair_map(ranks: Sequence[Ranks], read: Sites, written: Sites) -> PairMap:
    """Returns the map of pairs, which are given offset by offset."""
    tiles = TILE * torch.arange(-(-len(written) // TILE) + 1, dtype=torch.int32, device=written.order.device)
    positions, start = [], 0
    for _, out in ranks:
        positions.append(torch.searchsorted(out, tiles) + start)
        start += len(out)
    if start > _MOST:
        raise GossamerError(f"a convolution of {start} pairs of sites, kernels take up to {_MOST}: make smaller batches")
    known: dict[tuple[int, int], Tensor] = {}
    inputs, outputs = (
        _rows(places, sites, start, known) for places, sites in zip(zip(*ranks, strict=True), (read, written), strict=True)
    )
    return PairMap(inputs, outputs, written.order, torch.stack(positions).int(), len(read))


def _rows(ranks: Sequence[Tensor], sites: Sites, count: int, known: dict[tuple[int, int], Tensor]) -> Tensor:
    """Returns the user's rows for ranks, offset by offset (`count` in all). Ranks of opposite offsets are converted once."""
    rows = empty((count,), torch.int32) if sites.order.is_cpu else sites.order.new_empty(count)
    for each, part in zip(ranks, rows.split([len(each) for each in ranks]), strict=True):
        found = known.setdefault((id(each), id(sites)), part)
        if sites.ascending or found is not part:
            part.copy_(each if sites.ascending else found)
        else:
            torch.index_select(sites.order, 0, each, out=part)
    return rows


def neighbours(sites: Sites, window: Window) -> list[Ranks]:
    """Returns the pairs of a window centred on each site, with odd sizes of the kernel.

    Offsets k and -k have the same pairs, with inputs and outputs exchanged.
    """
    centre = [(k // 2) * d for k, d in zip(window.kernel, window.dilation, strict=True)]
    half = [[o - c for o, c in zip(offset, centre, strict=True)] for offset in window.offsets[: len(window.offsets) // 2]]
    everyone = _count(sites.order)
    before = at_offsets(sites, half)
    return [*before, (everyone, everyone), *((out, into) for into, out in reversed(before))]


def at_offsets(sites: Sites, offsets: Sequence[Sequence[int]]) -> list[Ranks]:
    """Returns, for each offset, the pairs of sites with input = output + offset."""
    largest = [max((abs(o) for o in along), default=0) for along in zip(*offsets, strict=True)] or [0] * len(sites.shape)
    reach = [min(c, n) for c, n in zip(largest, sites.shape, strict=True)]  # no site is farther away than the size of the grid
    keys, steps = sites.keys(reach), _steps(sites.shape, reach)
    shifts = [sum(max(-r, min(r, o)) * s for o, r, s in zip(offset, reach, steps, strict=True)) for offset in offsets]
    return _matches(keys, keys.new_tensor(shifts))


def _steps(shape: Sizes, margin: Sequence[int]) -> list[int]:
    sizes = [n + m for n, m in zip(shape, margin, strict=True)]
    return [prod(sizes[d + 1 :]) for d in range(len(sizes))]


def _matches(keys: Tensor, shifts: Tensor) -> list[Ranks]:
    """Returns the pairs of each shift, by kernel.match_keys for CPU tensors."""
    if not keys.is_cpu:
        return matches_by_bisection(keys, shifts)
    into, out = empty((2, len(shifts), len(keys)), torch.int32)
    counts = torch.zeros(len(shifts), dtype=torch.int32)
    run(MatchKeysOp, [keys, shifts], [into, out, counts])
    return [(into[s, :count], out[s, :count]) for s, count in enumerate(counts.tolist())]


def matches_by_bisection(keys: Tensor, shifts: Tensor) -> list[Ranks]:
    """Returns the pairs of each shift by torch's operations, on any device."""
    found = []
    for wanted in keys + shifts[:, None] if len(keys) else keys.new_empty(len(shifts), 0):
        at = torch.searchsorted(keys, wanted, out_int32=True).clamp_(max=len(keys) - 1)
        out = (keys.index_select(0, at) == wanted).nonzero()[:, 0]
        found.append((at.index_select(0, out), out.int()))
    return found


def coarser(sites: Sites, window: Window) -> tuple[Sites, list[Ranks]]:
    """Returns the sites that a window leads to from these sites, and the pairs."""
    shape = window.shape_of(sites.shape)
    _check_places((sites.batch, *shape))
    found = _led_to(sites, window, shape)
    keys, ranks = torch.unique(torch.cat([key for _, key in found]), return_inverse=True)
    places, left = [], keys
    for size in reversed(shape):
        places.append(left % size)
        left = left // size
    indices = torch.stack([left, *reversed(places)], 1).int()
    made = Sites(shape, sites.batch, _count(keys), indices, True)
    outputs = ranks.int().split([len(into) for into, _ in found])
    return made, [(into, out) for (into, _), out in zip(found, outputs, strict=True)]


def _led_to(sites: Sites, window: Window, shape: Sizes) -> list[tuple[Tensor, Tensor]]:
    """Returns, for each offset, the sites from which it leads to an output, and the numbers of the outputs, both ascending.

    It goes dimension by dimension, and drops sites that a tap leads outside of the grid.
    """
    batch, *columns = sites.places.t().to(torch.int64, memory_format=torch.contiguous_format)
    found = [(_count(sites.order), batch)]
    for dimension, size in enumerate(shape):
        taps = window.led_to(columns[dimension], dimension, size)
        found = [_kept(rows, keys, at, size) for rows, keys in found for at in taps]
    return found


def _kept(rows: Tensor, keys: Tensor, at: Tensor, size: int) -> tuple[Tensor, Tensor]:
    place = at.index_select(0, rows)
    kept = (place >= 0).nonzero()[:, 0]
    return rows.index_select(0, kept), keys.index_select(0, kept).mul_(size).add_(place.index_select(0, kept))
