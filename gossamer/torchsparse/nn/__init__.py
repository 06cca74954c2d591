"""TorchSparse's layers: `import gossamer.torchsparse.nn as spnn`."""

from gossamer.sparsity.torchsparse.convolution import Conv3d
from gossamer.sparsity.torchsparse.layers import (
    BatchNorm,
    GlobalAvgPool,
    GlobalMaxPool,
    GroupNorm,
    InstanceNorm,
    LeakyReLU,
    ReLU,
    SiLU,
)
from gossamer.torchsparse.nn import functional, utils

__all__ = [
    "BatchNorm",
    "Conv3d",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "InstanceNorm",
    "LeakyReLU",
    "ReLU",
    "SiLU",
    "functional",
    "utils",
]
