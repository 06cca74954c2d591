"""`from gossamer.torchsparse.utils.collate import sparse_collate_fn`"""

from gossamer.sparsity.torchsparse.batches import sparse_collate, sparse_collate_fn

__all__ = ["sparse_collate", "sparse_collate_fn"]
