"""Maps torch's dtypes to MLIR's names, for the element types that kernels compute with (dialects/elements.py)."""

import torch

from gossamer.dialects import elements

FLOATS: dict[torch.dtype, str] = {getattr(torch, each.torch): name for name, each in elements.FLOATS.items()}
"""Floating-point types: MLIR's name by torch's dtype."""
WEIGHTS: dict[torch.dtype, str] = {getattr(torch, each.torch): name for name, each in elements.WEIGHTS.items()}
"""Types of weights: the floats, and the types that weights are quantized to."""
ELEMENTS = FLOATS | {getattr(torch, each.torch): name for name, each in elements.INTEGERS.items()}
"""Types of operations on sparse tensors: the floats, and integers."""
