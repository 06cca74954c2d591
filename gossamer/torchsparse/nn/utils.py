"""What TorchSparse's layers are written with."""

from gossamer.sparsity.nn.torchsparse.functional import fapply
from gossamer.sparsity.nn.torchsparse.points import get_kernel_offsets

__all__ = ["fapply", "get_kernel_offsets"]
