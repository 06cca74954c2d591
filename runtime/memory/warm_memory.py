"""Memory for results: what earlier results have given up, still mapped, in place of fresh pages.

A fresh page costs a page fault and its clearing: for a large result of a graph kernel more than the kernel. glibc hands
blocks above 32 MiB back to the system as soon as they are free, so they are kept here instead.

Every result has a storage of its own, so that nobody who remembers an earlier one in the same place takes it for that. As that
of a tensor from NumPy it cannot grow, which torch says where `resize_` or a larger `out=` asks for it.
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
"""Bytes; smaller blocks mostly stay mapped anyway, and are had for less."""
_MOST = 512 << 20  # bytes kept for later
_HUGE = 2 << 20  # bytes of a huge page: kernels that read columns here and there look up 512 times fewer pages


class _Kept:
    """Blocks that nobody uses any more, by size; the size that was asked for last comes last."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, as the child of a fork has to: the thread that had the lock, in the middle of its work, is not there."""
        self._free: dict[int, list[mmap]] = {}
        self._size = 0
        self._lent: dict[int, tuple[weakref.ref[memoryview], mmap]] = {}
        self._returned: deque[mmap] = deque()  # when what was taken dies, which may be anywhere
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """A block of this many bytes or up to 1/8 more, in use as long as what is returned lives."""
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
        watched = weakref.ref(taken, self._give_back)  # a third of the time of weakref.finalize
        self._lent[id(watched)] = watched, block
        return taken

    def _give_back(self, watched: "weakref.ref[memoryview]") -> None:
        lent = self._lent.pop(id(watched), None)  # None after a fork
        if lent is None:
            return
        self._returned.append(lent[1])
        if self._lock.acquire(blocking=False):  # else who has it, maybe this thread, or the next one will collect the block
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
    """Uninitialised memory of at least so many bytes."""
    return bytearray(size) if size < LEAST else _kept.take(size)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised, contiguous CPU tensor."""
    size = prod(shape) * dtype.itemsize
    if size < LEAST:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_kept.take(size), dtype=dtype, count=prod(shape)).view(shape)


def empty_like(x: Tensor, *shape: int) -> Tensor:
    """The same of the type of another, which is faster for small ones."""
    return x.new_empty(*shape) if prod(shape) * x.itemsize < LEAST else empty(shape, x.dtype)
