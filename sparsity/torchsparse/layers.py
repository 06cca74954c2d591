"""TorchSparse's layers on features: norms, activations, and pooling over grids."""

from typing import Any

import torch
from torch import Tensor, nn

from gossamer.sparsity.torchsparse import functional
from gossamer.sparsity.torchsparse.tensors import GRIDS, SparseTensor


class _OnFeatures(nn.Module):
    """The base of layers of torch that get the features [N, C]."""

    def forward(self, input: Any) -> Any:
        return input.with_feats(super().forward(input.feats))


class BatchNorm(_OnFeatures, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d on the features."""


class ReLU(_OnFeatures, nn.ReLU):
    """torch.nn.ReLU on the features."""


class LeakyReLU(_OnFeatures, nn.LeakyReLU):
    """torch.nn.LeakyReLU on the features."""


class SiLU(_OnFeatures, nn.SiLU):
    """torch.nn.SiLU on the features."""


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm over the sites of each grid."""

    def forward(self, input: Any) -> Any:
        return _normalized(self, input, self.num_groups)


class InstanceNorm(nn.InstanceNorm1d):
    """torch.nn.InstanceNorm1d over the sites of each grid. TorchSparse itself normalizes each site over its channels."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False) -> None:
        super().__init__(num_features, eps, momentum, affine)

    def forward(self, input: Any) -> Any:
        return _normalized(self, input, self.num_features)


class GlobalAvgPool(nn.Module):
    """The mean of each channel over the sites of each grid, [batch, C]."""

    def forward(self, inputs: SparseTensor) -> Tensor:
        return functional.global_avg_pool(inputs)


class GlobalMaxPool(nn.Module):
    """The maximum of each channel over the sites of each grid, [batch, C]."""

    def forward(self, inputs: SparseTensor) -> Tensor:
        return functional.global_max_pool(inputs)


def _normalized(norm: Any, input: SparseTensor, groups: int) -> SparseTensor:
    """Normalizes each grid and group of channels to mean 0 and variance 1, then applies the layer's weight and bias."""
    given = input.feats
    x = (given if given.dtype == torch.float64 else given.float()).unflatten(1, (groups, -1))
    grid = input.coords[:, 0].long()
    counts = x.new_zeros(GRIDS, 1).index_add(0, grid, x.new_full((len(x), 1), float(x.shape[2]))).clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (x.new_zeros(GRIDS, groups).index_add(0, grid, values.sum(2)) / counts)[grid][..., None]

    centred = x - mean(x)
    y = (centred * torch.rsqrt(mean(centred.square()) + norm.eps)).flatten(1)
    return input.with_feats((y * norm.weight + norm.bias if norm.affine else y).to(given.dtype))
