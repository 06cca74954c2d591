"""`neighbours` returns pairs of neighbouring sites as a SparseTensor, for kernels of any shape, and for other sums."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.dialects.format import Format
from gossamer.sparsity.nn.site_maps import site_maps
from gossamer.sparsity.nn.sites import at_offsets
from gossamer.sparsity.nn.sparse_conv_tensor import SparseConvTensor
from gossamer.sparsity.nn.windows import Window
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, from_entries


def neighbours(x: SparseConvTensor, offsets: Sequence[Sequence[int]] | Tensor) -> SparseTensor:
    """Returns the pairs of neighbouring sites as a SparseTensor [offsets, N, N].

    Element [k, o, i] is 1 if site i is at the place of site o plus offset k. Its type is that of the features.

    offsets  whole numbers, one for each dimension of the grid; they may form a ball, a cross, or any other kernel

    A convolution with weight [offsets, C, D] is `gossamer.einsum("koi,ic,kcd->od", neighbours, features, weight)`. Other values
    than 1 (`with_values`) weigh pairs. Call it outside of compiled graphs, because the number of pairs is unknown in them.
    GossamerError if offsets do not fit, or if coordinates are wrong.
    """
    level = x.level
    rows = _whole(offsets, len(level.shape))
    indices, shape, batch, path = level.where
    sites = site_maps(indices, shape, batch).sites(Window.parse_several(path, len(shape)))
    pairs = at_offsets(sites, rows)
    counts = torch.tensor([len(into) for into, _ in pairs], dtype=torch.int64, device=sites.order.device)
    numbers = torch.arange(len(rows), device=counts.device).repeat_interleave(counts)
    none = sites.order[:0]
    into, out = (sites.order[torch.cat([none, *[pair[side] for pair in pairs]])].long() for side in (0, 1))
    size = len(rows), len(sites), len(sites)
    return from_entries(Format.csf(3), size, [numbers, out, into], x.features.detach().new_ones(len(into)))


def _whole(offsets: Sequence[Sequence[int]] | Tensor, dimensions: int) -> list[list[int]]:
    given = torch.as_tensor(offsets) if len(offsets) else torch.zeros(0, dimensions, dtype=torch.int64)
    if given.dim() != 2 or given.shape[1] != dimensions or given.is_floating_point() or given.is_complex():
        raise GossamerError(
            f"offsets are {given.dtype} {list(given.shape)}, must be whole numbers [offsets, {dimensions}], one a dimension"
        )
    found: list[list[int]] = given.long().tolist()
    return found
