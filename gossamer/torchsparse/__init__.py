"""TorchSparse's names for convolutions of points: write `gossamer.torchsparse` for `torchsparse` in a program's imports."""

from gossamer.sparsity.torchsparse.tensors import SparseTensor, cat
from gossamer.torchsparse import backbones, nn, utils

__all__ = ["SparseTensor", "backbones", "cat", "nn", "utils"]
