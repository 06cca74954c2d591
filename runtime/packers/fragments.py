"""Makes the arrays of the packings `Fragments` and `QuadFragments`: for each panel, its masks, where their values begin, and
the values."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.dialects.gpu_packings import Fragments


def fill(packing: Fragments, nonzero: Tensor, places: Tensor, nowhere: int) -> tuple[list[Tensor], Tensor]:
    """Returns positions, masks and offsets of a matrix [M, K], and the source of each value; arguments as in `fill.Rows`."""
    bits = _by_mask(packing, nonzero, False).any(-1)
    masks = (bits << torch.arange(bits.shape[-1])).sum(-1)
    counts = bits.sum(-1)
    begun = counts.cumsum(1)
    pieces = -(-begun[:, -1] // packing.PIECE)
    positions = torch.cat([pieces.new_zeros(1), pieces.cumsum(0)])
    first = positions[:-1, None] * packing.PIECE - torch.cat([begun.new_zeros(1), begun[:-1, -1].cumsum(0)])[:, None]
    number = torch.arange(int(counts.sum()))
    source = places.new_full((int(positions[-1]) * packing.PIECE, packing.neighbours), nowhere)
    stored = _by_mask(packing, places, nowhere)[bits]
    source[number + first.expand_as(counts).repeat_interleave(counts.flatten())] = stored
    return [positions, masks, begun - counts], source.flatten()


def _by_mask(packing: Fragments, matrix: Tensor, filled: int) -> Tensor:
    """Returns the elements of a matrix in the order of the packing, as [panels, masks of a panel, bits, neighbours]."""
    rows, columns, lines, width = packing.ROWS, packing.COLUMNS, packing.LINES, packing.neighbours
    edges = (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows)
    padded = pad(matrix, edges, value=filled)
    (m, k), across = padded.shape, 32 // lines
    # Rows as panel, tile, upper or lower quarter, part of the warp, line; columns as panel, tile, left or right quarter, place.
    cut = (m // rows, rows // 16, 2, 8 // lines, lines, k // columns, columns // (2 * across * width), 2, across, width)
    parts = padded.view(cut).permute(0, 5, 1, 6, 3, 7, 2, 4, 8, 9)
    return parts.reshape(-1, rows * columns // (32 * width), 32, width)
