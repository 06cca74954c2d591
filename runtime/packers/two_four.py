"""Makes the arrays of the packings `TwoFour` and `Vnm`: for every 4 columns, which 2 are stored, in the order that a warp
reads.

A warp multiplies 64 rows by 32 columns at a time, as four tiles of 16 rows. Row g (or g + 8) of tile i is row 8 g + 2 i (or
8 g + 2 i + 1) of the 64, so that the results of lanes 4 g to 4 g + 3 are neighbours.

A word of metadata belongs to lane 4 g + q and a pair p of tiles. It describes tile 2 p + q / 2, columns 0 to 15 for even q and
16 to 31 for odd q. Its low half is for row g, its high half for row g + 8. The words are ordered by 64 rows, 32 columns, pair
and lane. (PTX ISA, Matrix Fragments for sparse mma.m16n8k32.)
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.dialects.errors import FormatError
from gossamer.dialects.gpu_packings import TwoFour, Vnm


def fill(packing: TwoFour, nonzero: Tensor, places: Tensor, nowhere: int) -> tuple[list[Tensor], Tensor]:
    """Returns the metadata of a matrix [M, K], and the source of each value; arguments as in `fill.Rows`.

    Raises FormatError if a group of four has more than two nonzeros.
    """
    m, k = nonzero.shape
    edges = (0, -k % packing.COLUMNS, 0, -m % packing.ROWS)
    groups = pad(nonzero, edges).view(-1, 4)
    spare = 2 - groups.sum(1)
    if (full := (spare < 0).nonzero()).numel():
        row, column = divmod(int(full[0]) * 4, k + edges[1])
        raise FormatError(f"{packing}: row {row} has more than 2 nonzeros in columns {column} to {column + 3}, prune it to 2:4")
    chosen = groups | ((~groups).cumsum(1) <= spare[:, None])
    source = pad(places, edges, value=nowhere).reshape(-1, 4)[chosen]
    first, second = chosen.nonzero()[:, 1].view(-1, 2).unbind(1)
    codes = (first | second << 2).view(-1, 4)  # of 16 columns
    halves = (codes << torch.arange(0, 16, 4)).sum(1)
    # rows as [64, 8 g, 2 p, q / 2, 2], columns as [32, q % 2]
    words = halves.view(-1, 8, 2, 2, 2, (k + edges[1]) // 32, 2).permute(0, 5, 2, 1, 3, 6, 4)
    return [(words[..., 0] | words[..., 1] << 16).flatten()], source


def fill_selected(packing: Vnm, nonzero: Tensor, places: Tensor, nowhere: int) -> tuple[list[Tensor], Tensor]:
    """Returns the columns that each strip of rows stores, and the arrays of `fill` for these columns.

    Raises FormatError if a strip has nonzeros in more than 4 columns of a group, or a row has more than two there.
    """
    m, k = nonzero.shape
    strip, group = packing.rows, packing.group
    edges = (0, -k % (group * packing.GROUPS), 0, -m % TwoFour.ROWS)
    parts = lambda matrix, value: pad(matrix, edges, value=value).view(-1, strip, (k + edges[1]) // group, group)
    grouped = parts(nonzero, False)
    used = grouped.any(1)
    for counts, what, most, rows in (
        (used.sum(2)[:, None], "columns with nonzeros", 4, strip),
        (grouped.sum(3), "nonzeros", 2, 1),
    ):
        if (full := (counts > most).nonzero()).numel():
            first, row, number = full[0].tolist()
            row, column = first * strip + row, number * group
            here = f"row {row} has" if rows == 1 else f"rows {row} to {min(row + rows, m) - 1} have"
            raise FormatError(
                f"{packing}: {here} more than {most} {what} in columns {column} to {min(column + group, k) - 1}, "
                f"prune it to {strip}:2:{group}"
            )
    chosen = used | ((~used).cumsum(2) <= 4 - used.sum(2, keepdim=True))
    of_four = torch.where(chosen, chosen.cumsum(2) - 1, packing.NONE)
    each = chosen[:, None].expand_as(grouped)
    left, left_places = (matrix[each].view(m + edges[3], -1) for matrix in (grouped, parts(places, nowhere)))
    (metadata,), source = fill(TwoFour(1), left, left_places, nowhere)
    return [of_four, metadata], source
