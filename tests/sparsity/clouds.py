"""Points for tests: places of grids, their features on dense grids and back, and tolerances of sums over them."""

import torch
from torch import Tensor

from gossamer.torchsparse import SparseTensor

Shape = tuple[int, ...]
SHAPE = (9, 8, 10)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def sites(batch: int, shape: Shape, count: int) -> Tensor:
    """So many places of some grids, in any order."""
    there = torch.randperm(batch * torch.Size(shape).numel())[:count]
    return torch.stack(torch.unravel_index(there, (batch, *shape)), 1).int()


def at(grid: Tensor, indices: Tensor) -> Tensor:
    """[N, C] of [batch, C, ...]"""
    return grid.movedim(1, -1)[tuple(indices.long().T)]


def dense(features: Tensor, indices: Tensor, batch: int, shape: Shape) -> Tensor:
    """[batch, C, ...] of [N, C], in float64."""
    grid = torch.zeros(batch, *shape, features.shape[1], dtype=torch.float64)
    return grid.index_put(tuple(indices.long().T), features.detach().double()).movedim(-1, 1)


def close(found: Tensor, expected: Tensor) -> None:
    """Fails if they differ by more than sums in the type of `found` may."""
    tolerance = TOLERANCE[found.dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance)


def cloud(count: int = 300, channels: int = 4, grids: int = 2) -> SparseTensor:
    """So many places of grids of SHAPE, with TorchSparse's names."""
    return SparseTensor(torch.randn(count, channels), sites(grids, SHAPE, count), spatial_range=(grids, *SHAPE))
