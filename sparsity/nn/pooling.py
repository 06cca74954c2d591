"""Pooling of features at sites, with spconv's names and arguments.

SparseMaxPool{1,2,3,4}d     the maximum of each channel over the sites in a window
SparseAvgPool{1,2,3,4}d     the mean over these sites; places without a site do not count
SparseGlobalMaxPool, SparseGlobalAvgPool    maximum and mean over all sites of a grid, as a tensor [batch, C]
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.dialects.errors import GossamerError
from gossamer.sparsity.nn.convolve import largest_sites, sum_sites
from gossamer.sparsity.nn.layers import Size, SparseModule, described, led, window_of
from gossamer.sparsity.nn.sparse_conv_tensor import SparseConvTensor


class _Pool(SparseModule):
    dimensions: ClassVar[int]

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        indice_key: str | None = None,
    ) -> None:
        super().__init__()
        self.indice_key = indice_key
        self.window = window_of(self.dimensions, kernel_size, kernel_size if stride is None else stride, padding, dilation)

    def extra_repr(self) -> str:
        return described(self.window)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if len(x.level.shape) != self.dimensions:
            raise GossamerError(
                f"{type(self).__name__}: the sites have {len(x.level.shape)} dimensions, must have {self.dimensions}"
            )
        to = led(x, self.window, self.indice_key)
        return x.at(self._pooled(x.features, (*x.level.where, self.window.numbers, "down", to.indices.shape[0])), to)

    def _pooled(self, features: Tensor, where: tuple[Any, ...]) -> Tensor:
        raise NotImplementedError


class _MaxPool(_Pool):
    """Pools by the maximum. As in torch, NaN is larger than any number. The first of equal maxima gets the gradient."""

    def _pooled(self, features: Tensor, where: tuple[Any, ...]) -> Tensor:
        return features.gather(0, largest_sites(features.detach(), *where))


class _AvgPool(_Pool):
    def _pooled(self, features: Tensor, where: tuple[Any, ...]) -> Tensor:
        sums: Tensor = sum_sites(_wide(features), *where)
        means = sums / sum_sites(sums.new_ones(features.shape[0], 1), *where)
        return means.to(features.dtype)


def pooled(features: Tensor, indices: Tensor, batch: int, way: str) -> Tensor:
    """Returns the "mean" or "amax" [batch, C] of features [N, C] in each grid of a batch; zeros for a grid without sites."""
    grid, wide = indices[:, :1].long().expand_as(features), _wide(features)
    reduced = wide.new_zeros(batch, features.shape[1]).scatter_reduce(0, grid, wide, way, include_self=False)
    return reduced.to(features.dtype)


def _wide(features: Tensor) -> Tensor:
    """Returns features as their sums are computed: in f32 at least, because a sum may exceed the range of float16."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


class _GlobalPool(SparseModule):
    """Pools features [N, C] of a batch of grids to [batch, C]; zeros for a grid without sites."""

    way: ClassVar[str]

    def forward(self, x: SparseConvTensor) -> Tensor:
        return pooled(x.features, x.indices, x.batch_size, self.way)


class SparseGlobalMaxPool(_GlobalPool):
    """The maximum of each channel over all sites of a grid. Equal maxima share the gradient."""

    way = "amax"


class SparseGlobalAvgPool(_GlobalPool):
    """The mean of each channel over all sites of a grid."""

    way = "mean"


class SparseMaxPool1d(_MaxPool):
    """See SparseMaxPool3d."""

    dimensions = 1


class SparseMaxPool2d(_MaxPool):
    """See SparseMaxPool3d."""

    dimensions = 2


class SparseMaxPool3d(_MaxPool):
    """Pools by the maximum of the sites in each window, like torch.nn.MaxPool3d. Outputs are all sites that a window
    reaches.
    """

    dimensions = 3


class SparseMaxPool4d(_MaxPool):
    """See SparseMaxPool3d."""

    dimensions = 4


class SparseAvgPool1d(_AvgPool):
    """See SparseAvgPool3d."""

    dimensions = 1


class SparseAvgPool2d(_AvgPool):
    """See SparseAvgPool3d."""

    dimensions = 2


class SparseAvgPool3d(_AvgPool):
    """Pools by the mean of the sites in each window. The divisor is the number of sites, not the size of the window."""

    dimensions = 3


class SparseAvgPool4d(_AvgPool):
    """See SparseAvgPool3d."""

    dimensions = 4
