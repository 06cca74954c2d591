"""Convolutions of point clouds, with the names and arguments of spconv: `import gossamer.nn as spconv`."""

from gossamer.sparsity.nn.layers import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SparseModule,
    SparseSequential,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
    ToDense,
)
from gossamer.sparsity.nn.sparse_conv_tensor import SparseConvTensor

__all__ = [
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTensor",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseModule",
    "SparseSequential",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "ToDense",
]
