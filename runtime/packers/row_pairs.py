"""The arrays of the packing `RowPairs`: which rows are a pair in each panel, and where their nonzeros lie."""

import torch
from torch.nn.functional import pad

from gossamer.dialects.packing import RowPairs
from gossamer.runtime.packers.nonzeros import divided, nonzero_places


def fill(
    packing: RowPairs, nonzero: torch.Tensor, places: torch.Tensor, nowhere: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Positions, coordinates and order of a matrix [M, K], and where each value lies in it; arguments as in `packers.Rows`."""
    (m, k), width, group = nonzero.shape, packing.width, packing.GROUP
    panels, rows = -(-k // width), m + m % 2
    by_panel = pad(nonzero, (0, -k % width, 0, rows - m)).view(rows, panels, width).transpose(0, 1)
    line, column = divided(nonzero_places(by_panel, places.dtype), width)
    counts = torch.bincount(line, minlength=panels * rows)
    starts = pad(counts.cumsum(0), (1, 0))
    order = _ordered(counts.view(panels, rows), packing.band(m))

    # A pair takes as many steps as its first row has groups.
    lines = (order + rows * torch.arange(panels)[:, None]).view(-1, 2)
    steps = -(-counts[lines[:, 0]] // group)
    begins = pad(2 * group * steps.cumsum(0), (1, 0))
    first = torch.empty(panels * rows, dtype=begins.dtype)  # where the first group of each line begins
    first[lines] = begins[:-1, None] + group * torch.arange(2)
    rank = torch.arange(len(line)) - starts[line]
    at = first[line] + 2 * group * (rank // group) + rank % group

    last = column[(starts[1:][lines] - 1).clamp(min=0)] if len(column) else column.new_zeros(lines.shape)
    last = torch.where(counts[lines] > 0, last, last[:, :1])
    coordinates = last.repeat_interleave(steps, 0).repeat_interleave(group, 1).flatten()
    coordinates[at] = column
    source = places.new_full((len(coordinates),), nowhere)
    panel, row = divided(line, rows)
    down, across = places.stride()  # it counts in one of two orders
    source[at] = row * down + (panel * width + column) * across
    return [begins, coordinates * packing.SCALE, order], source


def _ordered(counts: torch.Tensor, band: int) -> torch.Tensor:
    """The rows of each panel, [panels, rows], in bands by their `counts`, most first."""
    most = int(counts.max()) if counts.numel() else 0
    return (torch.arange(counts.shape[1]) // band * (most + 1) + most - counts).argsort(stable=True, dim=1)
