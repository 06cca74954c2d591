"""A compiled kernel that can be called: machine code, its workspace and the words it takes."""

import ctypes
import threading

import torch

from gossamer.runtime.jit import Code

_CACHE_LINE = 64
_get_num_threads = torch.get_num_threads


class Kernel:
    """Machine code of a region; calls are safe from any number of Python threads.

    `words` is how many words the operands and the output take, `workspace` the scratch bytes that each thread needs.
    """

    def __init__(self, code: Code, words: int, workspace: int) -> None:
        self._code, self._workspace = code, workspace
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
        self._arguments = _Arguments(words + 3)

    def run(self, words: list[int], shared: int = 0, scratch: int = 0) -> None:
        """Call with the words of all operands and of the output (see emit-entry), on torch.get_num_threads() threads, with
        `shared` more bytes of workspace for all, and `scratch` for each thread.

        Takes the list over. Nothing is checked: every address must hold what the kernel's types say.
        """
        threads = _get_num_threads()
        size = (self._workspace + scratch) * threads + shared
        if size > _workspace.size:
            _workspace.grow(size)
        words += (_workspace.address, size, threads)
        arguments = self._arguments
        arguments.array[:] = words  # type: ignore[assignment]  # ctypes converts the numbers
        self._function(arguments.address)


class _Arguments(threading.local):
    """The array of words that a Python thread passes to one kernel."""

    def __init__(self, length: int) -> None:
        self.array = (ctypes.c_int64 * length)()
        self.address = ctypes.addressof(self.array)


class _Workspace(threading.local):
    """Scratch memory of a Python thread: grows, is never given back, stays warm from call to call."""

    def __init__(self) -> None:
        self.size = -1

    def grow(self, size: int) -> None:
        """Have at least `size` bytes at `address`, aligned to cache lines."""
        self._memory = torch.empty(size + _CACHE_LINE, dtype=torch.uint8)
        self.address = -(-self._memory.data_ptr() // _CACHE_LINE) * _CACHE_LINE
        self.size = size


_workspace = _Workspace()
