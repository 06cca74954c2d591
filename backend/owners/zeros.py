"""`Zeros`: a summary of the zeros of a matrix, on which decisions about it depend. zeros_guard.py compares them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.runtime.packers.nonzeros import nonzero_mask
from gossamer.runtime.torch_internals import is_fake, is_traceable_wrapper_subclass

_FEWEST = 256
"""The fewest elements of a matrix whose zeros matter."""

_SIMILAR = 0.85
"""Two numbers of nonzeros mostly lead to the same decisions if their ratio is at least this."""

_DENSE = 0.9
"""The share of nonzeros above which every decision takes a matrix as dense."""


@dataclass(frozen=True)
class Zeros:
    """The zeros of a tensor of at least two dimensions, seen as a matrix with a row for each index of the first.

    elements    number of elements
    nonzeros    number of nonzeros
    groups      number of groups of four neighbours that have nonzeros; fewer if zeros come in blocks
    pairs       whether the matrix looks 2:4 sparse: about half zeros, and at most two nonzeros in each group
    """

    elements: int
    nonzeros: int
    groups: int
    pairs: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Zeros":
        """Counts the zeros of a tensor. Call this only if `has_zeros_to_see`."""
        mask: Any = nonzero_mask(tensor).cpu().contiguous().numpy().reshape(tensor.shape[0], -1)
        nonzeros = int(np.count_nonzero(mask))
        if nonzeros == mask.size:
            return cls(mask.size, nonzeros, mask.size // 4, False)
        fours = mask.reshape(-1)[: mask.size // 4 * 4].view(np.uint32)
        pairs = mask.size < 4 * nonzeros <= 2 * mask.size and bool(((fours * np.uint32(0x01010101)) >> 24).max(initial=0) <= 2)
        return cls(mask.size, nonzeros, int(np.count_nonzero(fours)), pairs)

    def resemble(self, other: "Zeros") -> bool:
        """Whether decisions for one matrix suit the other. Empty rows may differ: `smaller` checks them at every call."""
        same_counts = _similar(self.nonzeros, other.nonzeros, self.elements)
        return same_counts and _similar(self.groups, other.groups, self.elements // 4) and self.pairs == other.pairs


def has_zeros_to_see(tensor: Tensor) -> bool:
    """Whether decisions may depend on the zeros of this tensor."""
    plain = not tensor.is_meta and not is_fake(tensor) and not is_traceable_wrapper_subclass(tensor)
    return plain and tensor.layout is torch.strided and tensor.dim() > 1 and tensor.numel() >= _FEWEST


def _similar(a: int, b: int, most: int) -> bool:
    return min(a, b) >= _SIMILAR * max(a, b) or min(a, b) >= _DENSE * most
