"""The networks of TorchSparse's examples."""

from gossamer.sparsity.torchsparse.backbones import (
    SparseConvBlock,
    SparseConvTransposeBlock,
    SparseResBlock,
    SparseResNet21D,
    SparseResUNet42,
)

__all__ = ["SparseConvBlock", "SparseConvTransposeBlock", "SparseResBlock", "SparseResNet21D", "SparseResUNet42"]
