"""Makes the arrays of the packing `RowPairs`: which rows form a pair in each panel, and where their nonzeros lie."""

import torch
from torch.nn.functional import pad

from gossamer.dialects.packing import RowPairs
from gossamer.runtime.packers.nonzeros import divided, nonzero_places


def fill(
    packing: RowPairs, nonzero: torch.Tensor, places: torch.Tensor, nowhere: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns positions, coordinates and order of a matrix [M, K], and the source of each value; arguments as in
    `fill.Rows`."""
    (m, k), width, group = nonzero.shape, packing.width, packing.GROUP
    panels, rows = -(-k // width), m + m % 2
    by_panel = pad(nonzero, (0, -k % width, 0, rows - m)).view(rows, panels, width).transpose(0, 1)
    line, column = divided(nonzero_places(by_panel, places.dtype), width)
    counts = torch.bincount(line, minlength=panels * rows)
    starts = pad(counts.cumsum(0), (1, 0))
    order = _ordered(counts.view(panels, rows), packing.band(m))

    # A pair takes as many steps as its first row, the longer one, has nonzeros. A line is a row of a panel.
    lines = (order + rows * torch.arange(panels)[:, None]).view(-1, 2)
    steps = counts[lines[:, 0]]
    begins = pad(2 * steps.cumsum(0), (1, 0))
    first, whole, turn = (torch.empty(panels * rows, dtype=begins.dtype) for _ in range(3))
    first[lines], whole[lines], turn[lines] = begins[:-1, None], (steps // group * group)[:, None], torch.arange(2)

    def at(line: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        """Returns the place of a nonzero of a line. The rows of a pair take turns: by groups, then one by one after the last
        whole group."""
        in_group = 2 * rank - rank % group + group * turn[line]
        return first[line] + torch.where(rank < whole[line], in_group, 2 * rank + turn[line])

    # The second row is filled up with its last column, or the last column of the first row if it is empty.
    second, missing = lines[:, 1], steps - counts[lines[:, 1]]
    filled = second.repeat_interleave(missing)
    rank = counts[filled] + torch.arange(len(filled)) - (missing.cumsum(0) - missing).repeat_interleave(missing)
    of = torch.where(counts[second] > 0, second, lines[:, 0]).repeat_interleave(missing)
    coordinates = column.new_empty(int(begins[-1]))
    coordinates[at(filled, rank)] = column[starts[of + 1] - 1]
    places_of = at(line, torch.arange(len(line)) - starts[line])
    coordinates[places_of] = column
    source = places.new_full((len(coordinates),), nowhere)
    panel, row = divided(line, rows)
    down, across = places.stride()  # places count row by row, or column by column
    source[places_of] = row * down + (panel * width + column) * across
    return [begins, coordinates * packing.SCALE, order], source


def _ordered(counts: torch.Tensor, band: int) -> torch.Tensor:
    """Returns the rows of each panel, [panels, rows], sorted within bands by their `counts`, most first."""
    most = int(counts.max()) if counts.numel() else 0
    return (torch.arange(counts.shape[1]) // band * (most + 1) + most - counts).argsort(stable=True, dim=1)
