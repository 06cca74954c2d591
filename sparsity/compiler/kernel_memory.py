"""Gives kernels the memory that they ask for while they run (see passes/loops/ask_for_memory.py).

A kernel that itself finds out the size of its result calls the function at `GIVER`. It gets memory that the process has used
before (see warm_memory.py), so the system need not map it again. The memory goes back when the last tensor over it dies.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gossamer.runtime.memory import warm_memory

COPIED = 1 << 16
"""Up to this many bytes, an array is copied into a new tensor, which takes less time than tracking its block."""

Block = memoryview | bytearray


class _Call(threading.local):
    """The blocks that this thread's running kernel has got, by address, and the error if one could not be allocated."""

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
    except BaseException as problem:  # a kernel cannot propagate it
        _call.problem = problem


GIVER = ctypes.cast(_give, ctypes.c_void_p).value or 0
"""The address of the function that kernels call for memory."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came while a kernel asked for memory, before the function at GIVER could begin.

    Python drops the exception there, and the kernel ends without a result.
    """


@contextmanager
def given() -> Iterator[dict[int, Block]]:
    """Collects the blocks that kernels of this thread get within the context, by address.

    If one could not be allocated, its error is raised after the kernel has ended.
    """
    before, _call.blocks = _call.blocks, {}
    try:
        yield _call.blocks
        if _call.problem is not None:
            raise _call.problem
    finally:
        _call.blocks, _call.problem = before, None


def array_of(block: Block, count: int, dtype: torch.dtype) -> Tensor:
    """Returns the first elements of a block as a tensor. Small arrays, and those in a far larger block, are copied."""
    size = count * dtype.itemsize
    if size < COPIED or len(block) > 3 * size:
        out = warm_memory.empty([count], dtype)
        ctypes.memmove(out.data_ptr(), ctypes.addressof(ctypes.c_char.from_buffer(block)), size)
        return out
    return torch.frombuffer(block, dtype=dtype, count=count)
