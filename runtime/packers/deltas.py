"""Makes the arrays of the packing `Deltas`: rows by length, cut into parts for lanes, with the distances between nonzeros."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.dialects.gpu_packings import Deltas


def fill(packing: Deltas, nonzero: Tensor, places: Tensor, nowhere: int) -> tuple[list[Tensor], Tensor]:
    """Returns the arrays of a matrix [M, K] except the values, and the source of each value; arguments as in `fill.Rows`."""
    m, high, entries = nonzero.shape[0], packing.ROWS, packing.ENTRIES
    row, column = nonzero.nonzero(as_tuple=True)
    is_first = pad(row[1:] != row[:-1], (1, 0), value=True)[: len(row)]
    distance = column - torch.where(is_first, 0, column.roll(1))
    stored = 1 + (distance - 1).clamp(min=0) // packing.longest  # the nonzero, and zeros before it
    lengths = row.new_zeros(m).index_add(0, row, stored)
    order = lengths.argsort(descending=True, stable=True)
    by_length = pad(lengths[order], (0, -m % high))
    steps = (-(-by_length[::high] // (packing.PARTS * entries))).clamp(min=1)

    # Entries row by row, the longest first. The zeros that bridge a long distance come before their nonzero.
    width = int(steps.max()) * packing.PARTS * entries
    at = order.argsort()[row], stored.cumsum(0) - 1 - (lengths.cumsum(0) - lengths)[row]
    distances = ((torch.arange(width) < by_length[:, None]) * packing.longest).to(torch.uint8)
    distances[at] = (distance - packing.longest * (stored - 1)).to(torch.uint8)
    source = places.new_full(distances.shape, nowhere)
    source[at] = places[row, column]

    taken, values = (matrix.view(len(steps), high, -1, entries) for matrix in (distances, source))
    columns = pad(taken.sum(3).cumsum(2), (1, 0))  # where 16 entries begin
    slices, lines = torch.arange(len(steps)), torch.arange(high)[:, None]
    first, count = _shares(packing, steps)
    begun = first[..., None] * packing.PARTS + count[..., None] * torch.arange(packing.PARTS)
    starts = columns[slices[:, None, None, None], lines, begun[:, :, None]]
    slice_, part = _parts(packing, steps, first, count)
    lanes = slice_[:, None, None], lines, part[:, None]
    positions = pad(steps.cumsum(0), (1, 0))
    by_lane = values[lanes].view(-1, 32, 2, entries // 2).transpose(1, 2)
    return [pad(order, (0, -m % high), value=m), positions, starts, _words(packing, taken[lanes])], by_lane.flatten()


def _shares(packing: Deltas, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first step of each warp in each slice, and the number of its steps."""
    bounds = torch.arange(packing.WARPS + 1) * steps[:, None] // packing.WARPS
    return bounds[:, :-1], bounds.diff()


def _parts(packing: Deltas, steps: Tensor, first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each step of each slice, the slice, and which 16 entries of a row each lane has, [steps, PARTS]."""
    slice_ = torch.arange(len(steps)).repeat_interleave(steps)
    step = torch.arange(len(slice_)) - (steps.cumsum(0) - steps)[slice_]
    warp = ((step + 1) * packing.WARPS - 1) // steps[slice_]
    before, all_ = first[slice_, warp], count[slice_, warp]
    return slice_, (before * (packing.PARTS - 1) + step)[:, None] + all_[:, None] * torch.arange(packing.PARTS)


def _words(packing: Deltas, distances: Tensor) -> Tensor:
    """Returns the distances as the kernel reads them: int32 words of 4 or 8 bits each."""
    if packing.bits == 4:
        low, high = distances.view(*distances.shape[:3], 2, 2, 4).unbind(4)
        distances = low | high << 4
    return distances.flatten().view(torch.int32)
