"""What TorchSparse's layers are written with."""

from gossamer.sparsity.torchsparse.functional import fapply
from gossamer.sparsity.torchsparse.points import get_kernel_offsets

__all__ = ["fapply", "get_kernel_offsets"]
