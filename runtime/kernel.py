"""A compiled kernel that can be called: machine code, its workspace and the words it takes."""

import ctypes
import threading

import torch

from gossamer.runtime.jit import Code

_CACHE_LINE = 64


class Kernel:
    """Machine code of a region; calls are safe from any number of Python threads.

    `workspace` is the scratch memory in bytes that each thread of a call needs.
    """

    def __init__(self, code: Code, workspace: int) -> None:
        self._code, self._workspace = code, workspace
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)

    def run(self, words: list[int]) -> None:
        """Call with the words of all operands and of the output (see emit-entry), on torch.get_num_threads() threads.

        Nothing is checked: every address must hold what the kernel's types say.
        """
        threads = torch.get_num_threads()
        scratch = _scratch(self._workspace * threads)
        array = (ctypes.c_int64 * (len(words) + 3))(*words, scratch, self._workspace * threads, threads)
        self._function(ctypes.addressof(array))


class _Workspace(threading.local):
    """Scratch memory of a Python thread: grows, is never given back, stays warm from call to call."""

    memory: torch.Tensor | None = None


_workspace = _Workspace()


def _scratch(size: int) -> int:
    """The address of at least `size` bytes, aligned to cache lines."""
    memory = _workspace.memory
    if memory is None or memory.numel() < size + _CACHE_LINE:
        memory = _workspace.memory = torch.empty(size + _CACHE_LINE, dtype=torch.uint8)
    return -(-memory.data_ptr() // _CACHE_LINE) * _CACHE_LINE
