"""The arrays of the packing `Windows`: which step of which window each nonzero goes into.

A nonzero of block b can go into window b, whose first block that is, or into window b - 1, whose second block it is. From left
to right, a window takes as many steps as its fullest row needs to finish the first block; rows that need fewer take nonzeros
of the second block ahead. So rows even out over the blocks: of 16 lanes, two thirds of the places are used at a density of
10 %, nine tenths at 50 %.
"""

import torch

from gossamer.dialects.packing import Windows

_VALID = 128


def fill(packing: Windows, nonzero: torch.Tensor, places: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Bounds, origins and places of a matrix [M, K], and where each value lies in it; `places` as in `packers.Rows`."""
    lanes = packing.lanes
    m, k = nonzero.shape
    nonzero = torch.nn.functional.pad(nonzero, (0, -k % lanes, 0, -m % lanes))
    by_block = nonzero.view(nonzero.shape[0] // lanes, lanes, nonzero.shape[1] // lanes, lanes)
    steps, ahead, begins = _steps(by_block.sum(3))
    threes, twos = _runs(steps)
    runs = torch.stack([threes, twos], 1)
    in_group = 3 * threes.sum(1) + 2 * twos.sum(1)
    first = in_group.cumsum(0) - in_group
    # Each nonzero's window, its slot there (the how manieth of its row), and the step that this slot is.
    group, lane, block, column = by_block.nonzero(as_tuple=True)
    rank = (by_block.cumsum(3, dtype=torch.int32) - 1)[by_block].long()
    taken = ahead[group, lane, block]
    early = rank < taken
    window = block - early.long()
    slot = torch.where(early, begins[group, lane, window] + rank, rank - taken)
    before = runs.cumsum(2) - runs
    in_threes = 3 * threes[group, window]
    step = torch.where(
        slot < in_threes,
        3 * before[group, 0, window] + slot,
        3 * threes.sum(1)[group] + 2 * before[group, 1, window] + slot - in_threes,
    )
    at = (first[group] + step) * lanes + lane
    total = int(in_group.sum()) * lanes
    looked_up = torch.zeros(total, dtype=torch.int32)
    looked_up[at] = (_VALID + column + lanes * early).int()
    source = places.new_full((total,), places.numel())
    source[at] = places[group * lanes + lane, block * lanes + column]
    origins = torch.arange(steps.shape[1]).expand(runs.shape).flatten().repeat_interleave(runs.flatten())
    count = runs.sum((1, 2))
    end = count.cumsum(0)
    bounds = torch.stack([first, end - count, end - twos.sum(1), end], 1)
    return [bounds, origins, looked_up], source


def _steps(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the nonzeros of each [group, lane, block]: the steps of each [group, window]; how many of them go into the window
    before; and at which slot of each [group, lane, window] those of its second block begin."""
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
    """Runs of 3 and of 2 that make up each number of steps, none of which is 1."""
    twos = (-steps) % 3
    return (steps - 2 * twos) // 3, twos
