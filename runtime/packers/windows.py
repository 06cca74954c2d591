"""Makes the arrays of the packing `Windows`: which step of which window each nonzero goes into.

A window spans two blocks of columns. Block b is the first block of window b, and the second block of window b - 1, so its
nonzeros can go into either. From left to right, a window takes as many steps as its fullest row needs to finish the first
block. Rows that need fewer steps take nonzeros of the second block ahead. So rows even out over the blocks: with 16 lanes,
nonzeros use two thirds of the places at a density of 10 %, and nine tenths at 50 %.
"""

import numpy as np
import torch

from gossamer.dialects.packing import Windows
from gossamer.runtime.packers.nonzeros import nonzero_places

_VALID = 128


def fill(packing: Windows, nonzero: torch.Tensor, places: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns bounds, origins and places of a matrix [M, K], and the source of each value; `places` as in `fill.Rows`."""
    lanes = packing.lanes
    m, k = nonzero.shape
    nonzero = torch.nn.functional.pad(nonzero, (0, -k % lanes, 0, -m % lanes))
    groups, blocks = nonzero.shape[0] // lanes, nonzero.shape[1] // lanes
    counts = nonzero.view(groups * lanes * blocks, lanes).sum(1, dtype=torch.int32)
    steps, ahead, begins = _steps(counts.view(groups, lanes, blocks))
    threes, twos = _runs(steps)
    in_group = 3 * threes.sum(1) + 2 * twos.sum(1)
    first = in_group.cumsum(0) - in_group
    # A piece is the part of a row in a block. Its first nonzeros go into the previous window, the others into its own.
    flat = steps.flatten()
    slots = (flat.cumsum(0) - flat).view(groups, 1, blocks)
    own = slots - ahead
    before = (slots + begins).roll(1, 2)  # unused for a row's first piece
    lane = torch.arange(lanes, dtype=torch.int32).view(1, lanes, 1).expand(groups, lanes, blocks)
    taken, own, before, lane = (_repeated(each, counts) for each in (ahead, own, before, lane))
    element = nonzero_places(nonzero, places.dtype)
    rank = torch.arange(element.numel()) - _repeated(counts.cumsum(0) - counts, counts)
    early = rank < taken
    slot = rank + torch.where(early, before, own)
    at = _order(threes, twos, first).index_select(0, slot).mul_(lanes).add_(lane)
    total = int(in_group.sum()) * lanes
    looked_up = places.new_zeros(total)
    looked_up.scatter_(0, at, torch.add(element & lanes - 1, early, alpha=lanes) + _VALID)
    if lanes == 64:
        looked_up = looked_up.view(-1, 4, 4, 4).transpose(1, 2).flatten()
    source = places.new_full((total,), places.numel())
    source.scatter_(0, at, places.flatten().index_select(0, nonzero_places(nonzero[:m, :k], places.dtype)))
    runs = torch.stack([threes, twos], 1)
    origins = torch.arange(blocks).expand(runs.shape).flatten().repeat_interleave(runs.flatten())
    count = runs.sum((1, 2))
    end = count.cumsum(0)
    bounds = torch.stack([first, end - count, end - twos.sum(1), end], 1)
    return [bounds, origins, looked_up], source


def _repeated(of_piece: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns a value for each nonzero, from a value for each piece of a row."""
    return torch.from_numpy(np.repeat(of_piece.flatten().numpy(), counts.numpy()))


def _order(threes: torch.Tensor, twos: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Returns the step of each slot of the windows [group, window]. The runs of 3 of a group come before its runs of 2."""
    of_run = torch.stack([3 * threes, 2 * twos], 2)
    ends = of_run.transpose(1, 2).flatten(1).cumsum(1).view(len(threes), 2, threes.shape[1]).transpose(1, 2)
    begins = ends - of_run + first.view(-1, 1, 1)
    flat = of_run.flatten()
    starts = flat.cumsum(0) - flat
    return torch.arange(int(flat.sum())) + (begins.flatten() - starts).repeat_interleave(flat)


def _steps(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns three arrays from the number of nonzeros of each [group, lane, block].

    steps   [group, window], the steps of a window
    ahead   [group, lane, block], how many nonzeros of a block go into the previous window
    begins  [group, lane, window], the slot at which the nonzeros of the second block begin
    """
    groups, lanes, blocks = counts.shape
    steps, ahead = counts.new_zeros(groups, blocks), counts.new_zeros(groups, lanes, blocks + 1)
    following = torch.nn.functional.pad(counts, (0, 1))
    for block in range(blocks):
        left = counts[:, :, block] - ahead[:, :, block]
        needed = left.amax(1)
        steps[:, block] = torch.where(needed == 1, 2, needed)  # no run is shorter than 2
        ahead[:, :, block + 1] = torch.minimum(steps[:, block, None] - left, following[:, :, block + 1])
    ahead = ahead[:, :, :blocks]
    return steps, ahead, counts - ahead


def _runs(steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many runs of 3 and of 2 make up each number of steps. No number may be 1."""
    twos = (-steps) % 3
    return (steps - 2 * twos) // 3, twos
