"""TorchSparse's functions between points and voxels: hashes of coordinates, means over voxels, interpolation from them."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.sparsity.torchsparse.tensors import three

_BASIS, _PRIME = 14695981039346656037 - (1 << 64), 1099511628211


def sphash(coords: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Returns the FNV-1 hash of int32 coordinates [N, 4]: int64 [N], or [K, N] for coordinates moved by offsets [K, 3].

    Different coordinates have the same hash in one case of 2**60. No hash is negative.
    """
    moved = coords.long() if offsets is None else _moved(coords.long(), offsets.long())
    hashed = torch.full(moved.shape[:-1], _BASIS, dtype=torch.int64, device=coords.device)
    for column in moved.unbind(-1):
        hashed = (hashed ^ (column & 0xFFFFFFFF)) * _PRIME
    return (hashed >> 60 & 15) ^ (hashed & (1 << 60) - 1)


def _moved(coords: Tensor, offsets: Tensor) -> Tensor:
    """Returns the moved coordinates [K, N, 4]. The first column, the number in the batch, stays."""
    return torch.cat([coords[:, :1].expand(len(offsets), -1, -1), coords[:, 1:] + offsets[:, None]], 2)


def sphashquery(queries: Tensor, references: Tensor) -> Tensor:
    """Returns the place of each query among the references [M], -1 if it is not there: int64, shaped like the queries."""
    if references.numel() == 0:
        return torch.full_like(queries, -1)
    ordered, order = references.sort(stable=True)
    at = torch.searchsorted(ordered, queries).clamp(max=len(ordered) - 1)
    return torch.where(ordered[at] == queries, order[at], -1)


def spcount(coords: Tensor, num: int) -> Tensor:
    """Returns how often each number occurs in `coords` [N], without negative ones: int32 [num]."""
    return torch.bincount(coords[coords >= 0].long(), minlength=num).int()


def spvoxelize(feats: Tensor, coords: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean of the features [N, C] of each voxel's points, [M, C]. coords [N] is a point's voxel, -1 for none."""
    inside = coords >= 0
    sums = feats.new_zeros(len(counts), feats.shape[1]).index_add(0, coords[inside].long(), feats[inside])
    return sums / counts.clamp(min=1)[:, None].to(feats.dtype)


def calc_ti_weights(coords: Tensor, idx_query: Tensor, scale: float = 1) -> Tensor:
    """Returns the weights [8, N] of trilinear interpolation between the corners of each point's voxel.

    coords     [N, 3 or more], the place in the first three columns
    idx_query  [8, N]; weights are 0 where it is -1
    scale      the size of a voxel
    """
    place = coords[:, :3] / scale
    upper = place - place.floor()
    sides = torch.stack([1 - upper, upper])
    corners = torch.stack([sides[x, :, 0] * sides[y, :, 1] * sides[z, :, 2] for x, y, z in product((0, 1), repeat=3)])
    corners = torch.where(idx_query == -1, 0.0, corners)
    return (corners / (corners.sum(0) + 1e-8)).detach()


def spdevoxelize(feats: Tensor, coords: Tensor, weights: Tensor) -> Tensor:
    """Returns sums of voxels' features [M, C] at coords [N, 8] times weights [N, 8], [N, C]; -1 counts as zeros."""
    if coords.shape != weights.shape or coords.dim() != 2:
        raise ArgumentError(f"spdevoxelize: coords are {list(coords.shape)}, weights {list(weights.shape)}, must be [N, 8]")
    weights = torch.where(coords < 0, 0, weights).to(feats.dtype)
    return (feats[coords.clamp(min=0).long()] * weights[..., None]).sum(1)


def get_kernel_offsets(
    size: int | Sequence[int], stride: int | Sequence[int] = 1, dilation: int | Sequence[int] = 1, device: str = "cpu"
) -> Tensor:
    """Returns the places of a kernel's taps, int32 [taps, 3], in the order of Conv3d."""
    size, stride, dilation = three("size", size), three("stride", stride), three("dilation", dilation)
    steps = [[(k - (n - 1) // 2) * s * d for k in range(n)] for n, s, d in zip(size, stride, dilation, strict=True)]
    odd = size[0] * size[1] * size[2] % 2
    taps = [place[::-1] for place in product(*steps[::-1])] if odd else list(product(*steps))
    return torch.tensor(taps, dtype=torch.int32, device=device)
