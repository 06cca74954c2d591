"""Memory for results: what earlier results have given up, still mapped, in place of fresh pages.

A fresh page costs a page fault and its clearing: for a large result of a graph kernel more than the kernel. glibc hands
blocks above 32 MiB back to the system as soon as they are free, so they are kept here instead.

Every result has a storage of its own, so that nobody who remembers an earlier one in the same place takes it for that.
"""

import threading
import weakref
from collections.abc import Sequence
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

_LEAST = 1 << 20  # bytes; smaller blocks stay mapped anyway
_MOST = 512 << 20  # bytes kept for later


class _Kept:
    """Blocks handed out before, the longest unused first."""

    def __init__(self) -> None:
        self._blocks: list[tuple[mmap, weakref.ref[memoryview]]] = []  # with what the latest storage there holds on to
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """A block of this many bytes, in use as long as what is returned lives."""
        with self._lock:
            free = next((n for n, (block, user) in enumerate(self._blocks) if len(block) == size and user() is None), None)
            block = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS) if free is None else self._blocks.pop(free)[0]
            taken = memoryview(block)
            self._blocks.append((block, weakref.ref(taken)))
            while sum(len(block) for block, _ in self._blocks) > _MOST:
                self._blocks.pop(0)
            return taken


_kept = _Kept()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised, contiguous CPU tensor."""
    size = prod(shape) * dtype.itemsize
    if size < _LEAST:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_kept.take(size), dtype=dtype).view(shape)
