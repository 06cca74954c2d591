"""The random numbers of passes/loops/random_bits.py by torch's operations: on any device; kernels are tested against."""

import torch
from torch import Tensor

_WORD = (1 << 32) - 1


def kept(seed: Tensor, entries: int, heads: int, dropout: float, dtype: torch.dtype) -> Tensor:
    """[entries, heads]: what dropout multiplies weights with, 0 or 1 / (1 - dropout). The seed is [1]."""
    counter = torch.arange(entries * heads, device=seed.device)
    left, right, key = counter & _WORD, counter >> 32, seed.long()
    for number in range(7):
        upper, lower = left * 0xD256, left * 0xD193
        product, high = (upper << 16) + lower, (upper + (lower >> 16)) >> 16
        left, right = (high ^ (key + number * 0x9E3779B9) ^ right) & _WORD, product & _WORD
    keeps = left >= min(round(dropout * 2**32), _WORD)
    return (keeps.to(dtype) / (1 - dropout)).view(entries, heads)
