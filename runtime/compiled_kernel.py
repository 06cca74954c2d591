"""Makes compiled kernels callable, alone or several in a row.

A kernel takes one array of 64-bit words: addresses and sizes of operands and output, then address and size of a workspace,
then the number of threads (see the pass emit-entry). `Kernel` fills this array and calls the machine code of `jit.load`.
`RegionKernel` says which words a region's operands have.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from gossamer.runtime.jit import Code
from gossamer.runtime.watching.calls import Wrap, watchable

CACHE_LINE = 64


_RUN = """
def run(o, out=None, shared=0, scratch=0):
    arguments, threads = here.arguments, get_num_threads()
    workspace, size = arguments.workspace, (each + scratch) * threads + shared
    if size > workspace.size:
        workspace.grow(size)
    arguments.array[:] = [{terms}, workspace.address, size, threads]
    function(arguments.address)
"""


class Kernel:
    """Machine code of a region, callable from any number of Python threads at once.

    code       the loaded machine code
    words      how many words the operands and the output take
    workspace  scratch bytes that each kernel thread needs
    terms      a Python expression for these words, in terms of operands `o` and output `out`; by default `o` is a list of words
    address    address of the function
    """

    run: Callable[..., None]
    """run(o, out, shared=0, scratch=0) calls the kernel on torch.get_num_threads() threads. The workspace gets `shared` more
    bytes for all threads together, and `scratch` more bytes for each thread. Nothing is checked: every address must hold what
    the kernel's types say."""

    words: Callable[..., list[Any]]
    """words(o, out) returns the words that `run` would pass, without the last three (workspace, its size, threads)."""

    def __init__(self, code: Code, words: int, workspace: int, terms: str = "*o") -> None:
        function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
        function.code = code  # keeps the memory of the code alive
        names: dict[str, Any] = {
            "here": _Here(words + 3), "each": workspace, "get_num_threads": torch.get_num_threads, "function": function,
        }  # fmt: skip
        exec(_RUN.format(terms=terms), names)  # a single function, because it runs at every call
        self.run = names["run"]
        self.words = eval(f"lambda o, out: [{terms}]")
        self.function, self.workspace, self.address = function, workspace, code.address
        self._count, self._here = words + 3, names["here"]
        self._names = names
        watchable(self)

    def watch(self, wrap: Wrap | None) -> None:
        """See `Watchable`."""
        self._names["function"] = self.function if wrap is None else wrap("kernel", "", self.function)

    def bound(self, words: Sequence[int]) -> Callable[..., None]:
        """Returns a function that takes the words after these first ones, and calls the kernel.

        For a small kernel, writing all words takes much of a call. This function packs the first ones only once.
        """
        before, after = struct.pack(f"{len(words)}q", *words), struct.Struct(f"{self._count - len(words)}q").pack
        here, function, needed, get_num_threads = self._here, self.function, self.workspace, torch.get_num_threads

        def call(*words: int) -> None:
            workspace, threads = here.arguments.workspace, get_num_threads()
            size = needed * threads
            if size > workspace.size:
                workspace.grow(size)
            function(before + after(*words, workspace.address, size, threads))

        def watch(wrap: Wrap | None) -> None:
            nonlocal function
            function = self.function if wrap is None else wrap("kernel", "", self.function)

        call.watch = watch  # type: ignore[attr-defined]
        return watchable(call)


class _Workspace:
    """Scratch memory. It grows as kernels need it, and is never freed, so that its pages stay in caches between calls."""

    def __init__(self) -> None:
        self.size = -1

    def grow(self, size: int) -> None:
        """Allocates at least `size` bytes at `address`, aligned to cache lines."""
        self._memory = torch.empty(size + CACHE_LINE, dtype=torch.uint8, device="cpu")
        self.address = -(-self._memory.data_ptr() // CACHE_LINE) * CACHE_LINE
        self.size = size


class _Arguments:
    """The array of words that a Python thread passes to one kernel, and the workspace that it passes to all of them."""

    __slots__ = ("address", "array", "workspace")

    def __init__(self, length: int, workspace: _Workspace) -> None:
        self.array = (ctypes.c_int64 * length)()
        self.address = ctypes.addressof(self.array)
        self.workspace = workspace


class _Here(threading.local):
    """The `_Arguments` of the current Python thread. A call reads one attribute only, because those of a `local` are slow."""

    def __init__(self, length: int) -> None:
        self.arguments = _Arguments(length, _thread.workspace)


class _Thread(threading.local):
    """The workspace of a Python thread."""

    def __init__(self) -> None:
        self.workspace = _Workspace()


_thread = _Thread()


def workspace() -> _Workspace:
    """Returns the scratch memory of this Python thread."""
    return _thread.workspace


@dataclass(frozen=True)
class Given:
    """A word that is known only at the call: an address from the call's list, by its `number`, plus `offset` bytes."""

    number: int
    offset: int = 0

    def __add__(self, bytes: int) -> "Given":
        return Given(self.number, self.offset + bytes)


@dataclass(slots=True)  # many are made, and frozen ones take three times as long
class Memory:
    """Stands for a tensor that does not exist yet: the address that it will have, and its shape."""

    address: int | Given
    shape: tuple[int, ...]

    def data_ptr(self) -> int | Given:
        """Returns the address, as `Tensor.data_ptr` does."""
        return self.address

    def part(self, image: int, low: int, high: int, itemsize: int) -> "Memory":
        """Returns channels [low, high) of one image, where the memory is a contiguous [N, channels, ...]."""
        _, channels, *sizes = self.shape
        offset = (image * channels + low) * prod(sizes) * itemsize
        return Memory(self.address + offset, (1, high - low, *sizes))


class KernelsInARow:
    """Calls several kernels, one after the other. Their words stay the same from call to call, except for a few addresses.

    For small kernels, finding the words takes most of a call; this class finds them once. Only the Python thread that made
    the object may call it, with the list of addresses.

    calls  each kernel with its words, from `Kernel.words`; a word that changes is a `Given`
    """

    def __init__(self, calls: Sequence[tuple[Kernel, Sequence[int | Given]]]) -> None:
        self._needed = max(kernel.workspace for kernel, _ in calls)
        self._arrays = [(ctypes.c_int64 * (len(words) + 3))() for _, words in calls]
        self._functions = [kernel.function for kernel, _ in calls]
        self._words: list[int] = []
        self._open: list[tuple[Any, int, int, int]] = []
        for array, (_, words) in zip(self._arrays, calls, strict=True):
            self._words.append(ctypes.addressof(array))
            for place, word in enumerate(words):
                if isinstance(word, Given):
                    self._open.append((array, place, word.number, word.offset))
                else:
                    array[place] = word
        self._there = (-1, -1, 0)
        self.watch(None)
        watchable(self)

    def watch(self, wrap: Wrap | None) -> None:
        """See `Watchable`."""
        functions = [each if wrap is None else wrap("kernel", "", each) for each in self._functions]
        self._calls = [*zip(functions, self._words, strict=True)]

    def __call__(self, addresses: Sequence[int]) -> None:
        workspace, threads = _thread.workspace, torch.get_num_threads()
        if workspace.size < self._needed * threads:
            workspace.grow(self._needed * threads)
        if (there := (workspace.address, workspace.size, threads)) != self._there:
            for array in self._arrays:
                array[-3:] = list(there)
            self._there = there
        for array, place, number, offset in self._open:
            array[place] = addresses[number] + offset
        for function, words in self._calls:
            function(words)


def places(sizes: Sequence[int], last_uses: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offset of each result in one piece of memory, and the bytes of that piece.

    Call n makes result n, of `sizes[n]` bytes. Call `last_uses[n]` is the last one that reads it.
    """
    found, end = list[int](), 0
    for n, size in enumerate(sizes):
        taken = sorted((at, at + sizes[m]) for m, at in enumerate(found) if last_uses[m] >= n)
        at = 0
        for low, high in taken:
            if at + size <= low:
                break
            at = max(at, -(-high // CACHE_LINE) * CACHE_LINE)
        found.append(at)
        end = max(end, at + size)
    return found, end
