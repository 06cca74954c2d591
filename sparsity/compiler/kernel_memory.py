"""Memory that kernels ask for while they run (see passes/loops/ask_for_memory.py).

A kernel whose result has a size that only the kernel finds out calls the function at `GIVER`. What it is given is memory that
the process has used before (see warm_memory.py), so that the system need not map it again. Nobody has to free it: it goes back
when the last tensor over it dies.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gossamer.runtime.memory import warm_memory

COPIED = 1 << 16
"""Bytes up to which an array is copied into a tensor of its own: that takes less time than to watch over its block."""

Block = memoryview | bytearray


class _Call(threading.local):
    """The blocks that the kernel which runs on this thread was given, by address, and the error if one could not be given."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.problem: BaseException | None = None


_call = _Call()


@ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_void_p)
def _give(size: int, place: int) -> None:
    try:
        block = warm_memory.block(max(size, 1))
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        _call.blocks[address] = block
        ctypes.c_size_t.from_address(place).value = address
    except BaseException as problem:  # which no kernel can pass on
        _call.problem = problem


GIVER = ctypes.cast(_give, ctypes.c_void_p).value or 0
"""The address of the function that gives memory."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came when a kernel asked for memory, before the function at GIVER could begin. Python drops what is raised there,
    and the kernel ends without a result."""


@contextmanager
def given() -> Iterator[dict[int, Block]]:
    """The blocks that kernels ask for in here, on this thread, by address. If one could not be given, its error is raised when
    the kernel is done."""
    before, _call.blocks = _call.blocks, {}
    try:
        yield _call.blocks
        if _call.problem is not None:
            raise _call.problem
    finally:
        _call.blocks, _call.problem = before, None


def array_of(block: Block, count: int, dtype: torch.dtype) -> Tensor:
    """The first elements of a block as a tensor. Few are copied, and those of a block more than three times as large."""
    size = count * dtype.itemsize
    if size < COPIED or len(block) > 3 * size:
        out = warm_memory.empty([count], dtype)
        ctypes.memmove(out.data_ptr(), ctypes.addressof(ctypes.c_char.from_buffer(block)), size)
        return out
    return torch.frombuffer(block, dtype=dtype, count=count)
