"""What users hold in their hands: sparse tensors and what can be computed with them, pruned models made ready to compile."""

from gossamer.sparsity import (
    attention_derivatives,
    cuda_operations,
    densify,
    elementwise,
    joining,
    pointwise,
    products,
    reductions,
    shapes,
    slices,
    softmax,
    tall_product,
)
from gossamer.sparsity.einsum import EinsumError, einsum
from gossamer.sparsity.prepare import Mask, prepare
from gossamer.sparsity.tensor import SparseTensor

operations = (
    attention_derivatives, densify, elementwise, joining, pointwise, products, reductions, shapes, slices, softmax,
    tall_product,
)  # fmt: skip
"""Importing these is what teaches torch's functions about SparseTensors, and autograd about attention."""

cuda_operations.register()

__all__ = ["EinsumError", "Mask", "SparseTensor", "einsum", "operations", "prepare"]
