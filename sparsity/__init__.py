"""What users hold in their hands: sparse tensors and what can be computed with them, pruned models made ready to compile."""

from gossamer.sparsity import functions, pointwise
from gossamer.sparsity.einsum import EinsumError, einsum
from gossamer.sparsity.prepare import Mask, prepare
from gossamer.sparsity.tensor import SparseTensor

__all__ = ["EinsumError", "Mask", "SparseTensor", "einsum", "functions", "pointwise", "prepare"]
