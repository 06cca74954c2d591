"""Helpers of TorchSparse's layers: functions of features, and the offsets of a kernel."""

from gossamer.sparsity.torchsparse.functional import fapply
from gossamer.sparsity.torchsparse.points import get_kernel_offsets

__all__ = ["fapply", "get_kernel_offsets"]
