"""TorchSparse's functions on SparseTensors: activations, and pooling over grids."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.sparsity.nn.pooling import pooled
from gossamer.sparsity.torchsparse.tensors import SparseTensor


def fapply(input: SparseTensor, fn: Callable[..., Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """Applies a function to the features [N, C], at the same places."""
    return input.with_feats(fn(input.feats, *args, **kwargs))


def relu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    """Applies torch.nn.functional.relu to the features."""
    return fapply(input, F.relu, inplace=inplace)


def silu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    """Applies torch.nn.functional.silu to the features."""
    return fapply(input, F.silu, inplace=inplace)


def leaky_relu(input: SparseTensor, negative_slope: float = 0.1, inplace: bool = True) -> SparseTensor:
    """Applies torch.nn.functional.leaky_relu to the features."""
    return fapply(input, F.leaky_relu, negative_slope=negative_slope, inplace=inplace)


def global_avg_pool(inputs: SparseTensor) -> Tensor:
    """Returns the mean of each channel over the sites of each grid, [batch, C]; zeros for a grid without sites."""
    return pooled(inputs.feats, inputs.coords, _batch(inputs), "mean")


def global_max_pool(inputs: SparseTensor) -> Tensor:
    """Returns the maximum of each channel over the sites of each grid, [batch, C]; zeros for a grid without sites."""
    return pooled(inputs.feats, inputs.coords, _batch(inputs), "amax")


def _batch(input: SparseTensor) -> int:
    """Returns the number of grids: that of the spatial_range if known, else up to the last grid with a site."""
    if input.spatial_range is not None:
        return input.spatial_range[0]
    grids = input.coords[:, 0]
    return int(torch.cat([grids, grids.new_full((1,), -1)]).max().item()) + 1
