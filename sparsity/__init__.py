"""What users hold in their hands: pruned models made ready to compile."""

from gossamer.sparsity.prepare import Mask, prepare

__all__ = ["Mask", "prepare"]
