"""Samples a few values of a tensor, to notice writes that torch does not count.

    w.data.mul_(2)    w.data += b @ a    NumPy    another tensor over the same memory

A write is noticed if it changes a sampled value, as a write to most of the tensor does. Comparing all values would read more
memory than a sparse product.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

_RUNS = 4
_WORDS = 8  # 8-byte words of a run: one or two cache lines
_CANDIDATES = 64
_MANY = 16  # tensors; beyond, each has a single run

Sample = tuple[memoryview | None, memoryview | None]
"""Sampled memory of a tensor, and a copy of its values. Both are equal until a write changes the memory. Compare them only
while the tensor lives."""


def samples_of(tensors: Sequence[Tensor]) -> list[Sample]:
    """Returns a sample of each tensor. Many tensors get a single run each, because each run that is compared fetches a cache
    line."""
    runs = 1 if len(tensors) > _MANY else _RUNS
    return [sample_of(t, runs) for t in tensors]


def sample_of(t: Tensor, runs: int = _RUNS) -> Sample:
    """Returns a sample of a tensor's memory: evenly spaced runs, chosen where most values are nonzero, or all of a small
    tensor. If the tensor is not contiguous in any order of its dimensions, returns evenly spaced values.
    """
    if type(t) not in (Tensor, Parameter) or not t.is_cpu or t.layout is not torch.strided:
        return None, None
    address, words = t.data_ptr(), t.nbytes // 8
    if address == 0 or t.nbytes == 0:
        return None, None
    if _span(t) != t.numel():
        return _spaced(t)
    memory: Any = (ctypes.c_uint8 * (8 * words or t.nbytes)).from_address(address)
    values: Any = np.frombuffer(memory, np.uint64 if words else np.uint8)
    several = words // (runs * _WORDS)
    if several:
        apart, several = words // runs, min(several, _CANDIDATES)
        candidates = values[: runs * apart].reshape(runs, apart)[:, : several * _WORDS].reshape(runs, several, _WORDS)
        values = candidates[:, np.count_nonzero(candidates, axis=(0, 2)).argmax()]
    return values.data, values.copy().data


def _span(t: Tensor) -> int:
    """Returns the number of places in memory from its first value to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _spaced(t: Tensor) -> Sample:
    """Returns a sample of evenly spaced values of a tensor, with any strides."""
    size, most = t.itemsize, max(2, int(_CANDIDATES ** (1 / t.dim())))
    memory: Any = (ctypes.c_uint8 * (_span(t) * size)).from_address(t.data_ptr())
    bytes_: Any = np.frombuffer(memory, np.uint8)
    whole = np.lib.stride_tricks.as_strided(bytes_, (*t.shape, size), (*(stride * size for stride in t.stride()), 1))
    values = whole[tuple(slice(None, None, -(-extent // most)) for extent in t.shape)]
    return values.data, values.copy().data
