"""The types of elements that kernels compute with (dialects/elements.py) as torch has them."""

import torch

from gossamer.dialects import elements

FLOATS: dict[torch.dtype, str] = {getattr(torch, each.torch): name for name, each in elements.FLOATS.items()}
"""The name in MLIR of each."""
WEIGHTS: dict[torch.dtype, str] = {getattr(torch, each.torch): name for name, each in elements.WEIGHTS.items()}
"""The same with those that weights are quantized to."""
ELEMENTS = FLOATS | {getattr(torch, each.torch): name for name, each in elements.INTEGERS.items()}
"""The same with integers, which operations on sparse tensors compute with."""
