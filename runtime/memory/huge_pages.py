"""Arrays on huge pages: a kernel that streams megabytes of a weight at every call is slowed down by looking up small pages, and
the first write to each small page takes longer than what is written."""

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
    """Copies of one-dimensional arrays one after the other, each on a cache line of its own, as far as whole huge pages can be
    asked for; small arrays, and those of other systems than Linux, as they are."""
    sizes = [-(-array.nbytes // _CACHE_LINE) * _CACHE_LINE for array in arrays]
    whole = sum(sizes) // _HUGE * _HUGE
    if not whole or sys.platform != "linux" or any(array.device.type != "cpu" for array in arrays):
        return arrays
    memory = torch.empty(sum(sizes) + _HUGE, dtype=torch.uint8)
    at = -memory.data_ptr() % _HUGE
    # An advice: where it is refused, small pages do.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr() + at), ctypes.c_size_t(whole), _MADV_HUGEPAGE)
    copies = []
    for array, size in zip(arrays, sizes, strict=True):
        copies.append(memory[at : at + array.nbytes].view(array.dtype).copy_(array.flatten()).view(array.shape))
        at += size
    return tuple(copies)


def large_empty(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous tensor on the CPU whose elements are anything. NumPy asks for huge pages, torch does not."""
    if not prod(sizes):
        return torch.empty(tuple(sizes), dtype=dtype)
    memory = np.empty(prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(tuple(sizes))


def large_zeros(sizes: Sequence[int]) -> torch.Tensor:
    """Such a tensor of zeros, f32."""
    return torch.from_numpy(np.zeros(tuple(sizes), dtype=np.float32))
