"""The zeros of a matrix in a few numbers: what decisions about it go by."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.runtime.packers.nonzeros import nonzero_mask
from gossamer.runtime.torch_internals import is_fake, is_traceable_wrapper_subclass

_FEWEST = 256
"""Elements of a matrix whose zeros matter."""

_SIMILAR = 0.85
"""Ratio of two numbers of nonzeros that lead to the same decisions, mostly."""

_DENSE = 0.9
"""Share of nonzeros from which on a matrix is dense for everybody."""


@dataclass(frozen=True)
class Zeros:
    """Of a tensor of two and more dimensions, seen as a matrix with a row for each of the first.

    elements    how many there are
    nonzeros    how many of them are not zero
    groups      how many of its groups of four neighbours have nonzeros: fewer where zeros come in blocks
    pairs       whether none of these groups has more than two, in a matrix that is about half zeros
    """

    elements: int
    nonzeros: int
    groups: int
    pairs: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Zeros":
        """To be asked about tensors that `has_zeros_to_see` names."""
        mask: Any = nonzero_mask(tensor).cpu().contiguous().numpy().reshape(tensor.shape[0], -1)
        nonzeros = int(np.count_nonzero(mask))
        if nonzeros == mask.size:
            return cls(mask.size, nonzeros, mask.size // 4, False)
        fours = mask.reshape(-1)[: mask.size // 4 * 4].view(np.uint32)
        pairs = mask.size < 4 * nonzeros <= 2 * mask.size and bool(((fours * np.uint32(0x01010101)) >> 24).max(initial=0) <= 2)
        return cls(mask.size, nonzeros, int(np.count_nonzero(fours)), pairs)

    def resemble(self, other: "Zeros") -> bool:
        """Whether what is decided for one of two matrices suits the other. Empty rows may be others: see `smaller`."""
        same_counts = _similar(self.nonzeros, other.nonzeros, self.elements)
        return same_counts and _similar(self.groups, other.groups, self.elements // 4) and self.pairs == other.pairs


def has_zeros_to_see(tensor: Tensor) -> bool:
    """Whether decisions may depend on the zeros of this tensor."""
    plain = not tensor.is_meta and not is_fake(tensor) and not is_traceable_wrapper_subclass(tensor)
    return plain and tensor.layout is torch.strided and tensor.dim() > 1 and tensor.numel() >= _FEWEST


def _similar(a: int, b: int, most: int) -> bool:
    return min(a, b) >= _SIMILAR * max(a, b) or min(a, b) >= _DENSE * most
