"""Memory that kernels ask for while they run (see passes/given_memory): it is warm, and nothing to free."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gossamer.sparsity.kernels import warm_memory

COPIED = 1 << 16
"""Bytes; copying fewer takes less time than keeping track of them."""

Block = memoryview | bytearray


class _Call(threading.local):
    """What the kernel that runs on this thread was given, by address, and what was raised meanwhile."""

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


@contextmanager
def given() -> Iterator[dict[int, Block]]:
    """What kernels are given in here on this thread, by address. What was raised when they asked is raised at the end."""
    before, _call.blocks = _call.blocks, {}
    try:
        yield _call.blocks
        if _call.problem is not None:
            raise _call.problem
    finally:
        _call.blocks, _call.problem = before, None


def array_of(block: Block, count: int, dtype: torch.dtype) -> Tensor:
    """The first elements of a block as a tensor, in memory of its own where the block is much larger, or small."""
    size = count * dtype.itemsize
    if size < COPIED or len(block) > 2 * size:
        out = warm_memory.empty([count], dtype)
        ctypes.memmove(out.data_ptr(), ctypes.addressof(ctypes.c_char.from_buffer(block)), size)
        return out
    return torch.frombuffer(block, dtype=dtype, count=count)
