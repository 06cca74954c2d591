"""The types of elements that kernels compute with (dialects/elements.py) as torch has them."""

import torch

from gossamer.dialects import elements

FLOATS: dict[torch.dtype, str] = {getattr(torch, each.torch): name for name, each in elements.FLOATS.items()}
"""The name in MLIR of each."""
ELEMENTS = FLOATS | {getattr(torch, each.torch): name for name, each in elements.INTEGERS.items()}
"""The same with integers, which operations on sparse tensors compute with."""
