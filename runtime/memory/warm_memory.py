"""Reuses the memory of earlier results for new results, because these pages are still mapped.

A fresh page takes a page fault and clearing. For a large result of a graph kernel, that takes longer than the kernel. glibc
returns blocks above 32 MiB to the system as soon as they are free, so this file keeps them instead.

Every result has its own storage. So code that remembers an earlier result in the same memory does not confuse the two. Like the
storage of a tensor from NumPy, it cannot grow: torch says so if `resize_` or a larger `out=` asks for it.
"""

import mmap as mapping
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

import torch
from torch import Tensor

_MADV_HUGEPAGE: int | None = getattr(mapping, "MADV_HUGEPAGE", None)  # Linux
LEAST = 1 << 18
"""Bytes of the smallest block that is kept. Smaller ones mostly stay mapped anyway, and torch allocates them faster."""
_MOST = 512 << 20  # bytes kept for later
_HUGE = 2 << 20  # bytes of a huge page; kernels that read scattered columns look up 512 times fewer pages


class _Kept:
    """Free blocks, by size. The size that was requested last comes last."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Resets everything. The child of a fork needs this: a thread that held the lock at the fork does not exist there."""
        self._free: dict[int, list[mmap]] = {}
        self._size = 0
        self._lent: dict[int, tuple[weakref.ref[memoryview], mmap]] = {}
        self._returned: deque[mmap] = deque()  # blocks of results that died, possibly in the middle of `take`
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Returns a block of at least this many bytes, and at most 1/8 more. It is in use as long as the returned object
        lives."""
        step = 1 << max(PAGESIZE.bit_length() - 1, size.bit_length() - 4)
        size = -(-size // step) * step
        with self._lock:
            if self._returned:
                self._collect()
            same = self._free.pop(size, None) or []
            self._free[size] = same
            block = same.pop() if same else None
            self._size -= size if block is not None else 0
        if block is None:
            block = _mapped(size)
        taken = memoryview(block)
        watched = weakref.ref(taken, self._give_back)  # takes a third of the time of weakref.finalize
        self._lent[id(watched)] = watched, block
        return taken

    def _give_back(self, watched: "weakref.ref[memoryview]") -> None:
        lent = self._lent.pop(id(watched), None)  # None after a fork
        if lent is None:
            return
        self._returned.append(lent[1])
        if self._lock.acquire(blocking=False):  # otherwise the holder, or the next `take`, collects it
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free.setdefault(len(block), []).append(block)
            self._size += len(block)
        while self._size > _MOST:
            size, blocks = next(iter(self._free.items()))
            if blocks:
                blocks.pop()
                self._size -= size
            else:
                del self._free[size]


def _mapped(size: int) -> mmap:
    try:
        block = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
    except (OSError, OverflowError) as problem:
        raise MemoryError(f"{size >> 20} MiB for a result, or on the way to one, cannot be had: {problem}") from problem
    if size >= _HUGE and _MADV_HUGEPAGE is not None:
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(_MADV_HUGEPAGE)
    return block


_kept = _Kept()
os.register_at_fork(after_in_child=_kept.forget)


def block(size: int) -> memoryview | bytearray:
    """Returns uninitialised memory of at least so many bytes."""
    return bytearray(size) if size < LEAST else _kept.take(size)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised, contiguous CPU tensor."""
    size = prod(shape) * dtype.itemsize
    if size < LEAST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(_kept.take(size), dtype=dtype, count=prod(shape)).view(shape)


def empty_like(x: Tensor, *shape: int) -> Tensor:
    """Returns such a tensor with the dtype of `x`. For small tensors this is faster than `empty`."""
    return x.new_empty(*shape) if prod(shape) * x.itemsize < LEAST else empty(shape, x.dtype)
