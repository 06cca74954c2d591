"""Computes the random numbers of dialects/philox.py by torch's operations, on any device. Kernels are tested against them."""

import torch
from torch import Tensor

from gossamer.dialects.philox import MULTIPLIER, philox, threshold

_WORD = (1 << 32) - 1


def kept(seed: Tensor, entries: int, heads: int, dropout: float, dtype: torch.dtype) -> Tensor:
    """Returns the factors of dropout [entries, heads]: 0 or 1 / (1 - dropout). The seed is [1]."""
    counter = torch.arange(entries * heads, device=seed.device)
    bits = philox(counter & _WORD, counter >> 32, _multiplied, lambda number: (seed.long() + number) & _WORD, torch.bitwise_xor)
    keeps = bits >= threshold(dropout)
    return (keeps.to(dtype) / (1 - dropout)).view(entries, heads)


def _multiplied(word: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the high and low halves of the product with the multiplier. It multiplies by halves, because int64 is signed."""
    upper, lower = word * (MULTIPLIER >> 16), word * (MULTIPLIER & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & _WORD
