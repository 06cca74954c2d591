"""Memory for results: what earlier results have given up, still mapped, in place of fresh pages.

A fresh page costs a page fault and its clearing: for a large result of a graph kernel more than the kernel. glibc hands
blocks above 32 MiB back to the system as soon as they are free, so they are kept here instead.
"""

import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_LEAST = 1 << 20  # bytes; smaller blocks stay mapped anyway
_MOST = 512 << 20  # bytes kept for later


class _Kept:
    """Blocks handed out before, the longest unused first."""

    def __init__(self) -> None:
        self._blocks: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.UntypedStorage:
        """A block of this many bytes that no tensor uses."""
        with self._lock:
            found = next((block for block in self._blocks if block.nbytes() == size and not _in_use(block)), None)
            if found is None:
                found = torch.UntypedStorage(size)
            else:
                self._blocks.remove(found)
            self._blocks.append(found)
            while sum(block.nbytes() for block in self._blocks) > _MOST:
                self._blocks.pop(0)
            return found


def _in_use(block: torch.UntypedStorage) -> bool:
    return torch._C._storage_Use_Count(block._cdata) > 1


_kept = _Kept()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised, contiguous CPU tensor."""
    size = prod(shape) * dtype.itemsize
    if size < _LEAST:
        return torch.empty(shape, dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(_kept.take(size)).view(shape)
