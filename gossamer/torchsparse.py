"""TorchSparse's names for convolutions of points: `import gossamer.torchsparse as torchsparse`, `spnn = torchsparse.nn`."""

from gossamer.sparsity.nn import torchsparse_names as nn
from gossamer.sparsity.nn.torchsparse_names import SparseTensor, cat

__all__ = ["SparseTensor", "cat", "nn"]
