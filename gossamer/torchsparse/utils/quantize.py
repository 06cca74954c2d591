"""`from gossamer.torchsparse.utils.quantize import sparse_quantize`"""

from gossamer.sparsity.torchsparse.batches import sparse_quantize

__all__ = ["sparse_quantize"]
