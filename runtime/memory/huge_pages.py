"""Puts arrays on huge pages. With small pages, address look-ups slow down a kernel that streams megabytes of a weight at every
call. And the page fault at the first write to a page takes longer than writing its bytes."""

import ctypes
import sys
from collections.abc import Sequence
from math import prod

import numpy as np
import torch

_HUGE = 2 << 20
_CACHE_LINE = 64
_MADV_HUGEPAGE = 14  # linux/mman.h


def placed(arrays: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns copies of the arrays in one piece of memory on huge pages. Each begins on a new cache line.

    Returns the arrays themselves if together they are smaller than a huge page, on GPUs, and on systems other than Linux.
    """
    sizes = [-(-array.nbytes // _CACHE_LINE) * _CACHE_LINE for array in arrays]
    whole = sum(sizes) // _HUGE * _HUGE
    if not whole or sys.platform != "linux" or any(array.device.type != "cpu" for array in arrays):
        return arrays
    memory = torch.empty(sum(sizes) + _HUGE, dtype=torch.uint8, device="cpu")
    at = -memory.data_ptr() % _HUGE
    # madvise may refuse; then the memory has small pages.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr() + at), ctypes.c_size_t(whole), _MADV_HUGEPAGE)
    copies = []
    for array, size in zip(arrays, sizes, strict=True):
        copies.append(memory[at : at + array.nbytes].view(array.dtype).copy_(array.flatten()).view(array.shape))
        at += size
    return tuple(copies)


def large_empty(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns an uninitialised, contiguous CPU tensor. Its memory is NumPy's, because NumPy asks for huge pages and torch does
    not."""
    if not prod(sizes):
        return torch.empty(tuple(sizes), dtype=dtype, device="cpu")
    memory = np.empty(prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(tuple(sizes))


def large_zeros(sizes: Sequence[int]) -> torch.Tensor:
    """Returns such a tensor of f32 zeros."""
    return torch.from_numpy(np.zeros(tuple(sizes), dtype=np.float32))
