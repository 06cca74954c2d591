"""A few values of a tensor, looked at to tell that something has written to it which torch does not count.

    w.data.mul_(2)    w.data += b @ a    NumPy    another tensor over the same memory

Such a write is seen if it changes what was looked at, as one to most of a tensor does. To compare all values would be to read
more than a sparse product does.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

_RUNS = 4
_WORDS = 8  # of a run, a line or two of a cache
_CANDIDATES = 64
_MANY = 16  # tensors, of which each has one run

Sample = tuple[memoryview | None, memoryview | None]
"""Memory of a tensor, and what was in it: equal as long as it still is. To be compared only while the tensor is there."""


def samples_of(tensors: Sequence[Tensor]) -> list[Sample]:
    """A sample of each. Of many tensors each is a single run: to fetch lines from memory is what comparing costs."""
    runs = 1 if len(tensors) > _MANY else _RUNS
    return [sample_of(t, runs) for t in tensors]


def sample_of(t: Tensor, runs: int = _RUNS) -> Sample:
    """Of its memory, so many runs that lie evenly and where most is not zeros, or all of a small one; nothing of a tensor
    between whose values others may lie."""
    if type(t) not in (Tensor, Parameter) or not t.is_cpu or t.layout is not torch.strided or _span(t) != t.numel():
        return None, None
    address, words = t.data_ptr(), t.nbytes // 8
    if address == 0 or t.nbytes == 0:
        return None, None
    memory: Any = (ctypes.c_uint8 * (8 * words or t.nbytes)).from_address(address)
    values: Any = np.frombuffer(memory, np.uint64 if words else np.uint8)
    several = words // (runs * _WORDS)
    if several:
        apart, several = words // runs, min(several, _CANDIDATES)
        candidates = values[: runs * apart].reshape(runs, apart)[:, : several * _WORDS].reshape(runs, several, _WORDS)
        values = candidates[:, np.count_nonzero(candidates, axis=(0, 2)).argmax()]
    return values.data, values.copy().data


def _span(t: Tensor) -> int:
    """From its first value to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
