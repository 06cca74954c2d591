"""Compiled kernels that can be called, alone or in a row: machine code, its workspace and the words it takes."""

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
    """Machine code of a region; calls are safe from any number of Python threads.

    It is made with how many `words` the operands and the output take. `terms` are Python's words for the words, of operands `o`
    and output `out`; by default `o` is a list of them. `workspace` are the scratch bytes that each thread needs, `address` is
    that of the function.
    """

    run: Callable[..., None]
    """run(o, out, shared=0, scratch=0) calls with the words of all operands and of the output (see emit-entry), on
    torch.get_num_threads() threads, with `shared` more bytes of workspace for all, and `scratch` for each thread. Nothing is
    checked: every address must hold what the kernel's types say."""

    words: Callable[..., list[Any]]
    """words(o, out) are the words that `run` would pass for these operands and this output, but for the last three."""

    def __init__(self, code: Code, words: int, workspace: int, terms: str = "*o") -> None:
        function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
        function.code = code  # whose memory is there as long as it is
        names: dict[str, Any] = {
            "here": _Here(words + 3), "each": workspace, "get_num_threads": torch.get_num_threads, "function": function,
        }  # fmt: skip
        exec(_RUN.format(terms=terms), names)  # one function, for it runs at every call
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
        """A function of the words that follow these first ones: much of a small kernel's call is to bring all into place."""
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
    """Scratch memory: grows, is never given back, stays warm from call to call."""

    def __init__(self) -> None:
        self.size = -1

    def grow(self, size: int) -> None:
        """Have at least `size` bytes at `address`, aligned to cache lines."""
        self._memory = torch.empty(size + CACHE_LINE, dtype=torch.uint8)
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
    """The `_Arguments` of the Python thread that asks: one look-up a call, for those of a `local` are slow."""

    def __init__(self, length: int) -> None:
        self.arguments = _Arguments(length, _thread.workspace)


class _Thread(threading.local):
    """The workspace of a Python thread."""

    def __init__(self) -> None:
        self.workspace = _Workspace()


_thread = _Thread()


def workspace() -> _Workspace:
    """The scratch memory of this Python thread."""
    return _thread.workspace


@dataclass(frozen=True)
class Given:
    """So many bytes behind an address that each call gives, by its number."""

    number: int
    offset: int = 0

    def __add__(self, bytes: int) -> "Given":
        return Given(self.number, self.offset + bytes)


@dataclass(slots=True)  # many are made, and frozen ones take three times as long
class Memory:
    """What a kernel takes in place of a tensor: where it will be, and its sizes."""

    address: int | Given
    shape: tuple[int, ...]

    def data_ptr(self) -> int | Given:
        """As a tensor has it."""
        return self.address

    def part(self, image: int, low: int, high: int, itemsize: int) -> "Memory":
        """Channels [low, high) of one of images [N, channels, ...] that lie one after the other."""
        _, channels, *sizes = self.shape
        offset = (image * channels + low) * prod(sizes) * itemsize
        return Memory(self.address + offset, (1, high - low, *sizes))


class KernelsInARow:
    """Calls of several kernels, one after the other, whose words stay the same but for a few addresses.

    Most of a small kernel's call is to find its words. To be called, with the addresses, by the Python thread that made it.

    `calls` are the kernels with the words that `Kernel.words` gives for operands and output.
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
    """Where results lie in one piece of memory, and its bytes. Result n is made by call n, read last by call `last_uses[n]`."""
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
