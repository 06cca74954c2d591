"""Calls of several kernels, one after the other, whose words stay the same from call to call but for a few addresses.

Most of a call is to find its words. Where images go through many small kernels, that took as long as their arithmetic.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import get_num_threads

from gossamer.runtime.kernel import Kernel, workspace_here

_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Given:
    """An address that each call gives, by its number."""

    number: int


@dataclass(frozen=True)
class Memory:
    """What a kernel takes in place of a tensor: where it will be, and its sizes."""

    address: int | Given
    shape: tuple[int, ...]

    def data_ptr(self) -> int | Given:
        """As a tensor has it."""
        return self.address


class KernelsInARow:
    """To be called by the Python thread that made it, with the addresses that its words leave open.

    `calls` are the kernels with the words that `Kernel.words` gives for operands and output.
    """

    def __init__(self, calls: Sequence[tuple[Kernel, Sequence[int | Given]]]) -> None:
        self._needed = max(kernel.workspace for kernel, _ in calls)
        self._arrays = [(ctypes.c_int64 * (len(words) + 3))() for _, words in calls]
        self._calls: list[tuple[Callable[[int], None], int]] = []
        self._open: list[tuple[Any, int, int]] = []
        for array, (kernel, words) in zip(self._arrays, calls, strict=True):
            self._calls.append((kernel.function, ctypes.addressof(array)))
            for place, word in enumerate(words):
                if isinstance(word, Given):
                    self._open.append((array, place, word.number))
                else:
                    array[place] = word
        self._there = (-1, -1, 0)

    def __call__(self, addresses: Sequence[int]) -> None:
        workspace, threads = workspace_here(), get_num_threads()
        if workspace.size < self._needed * threads:
            workspace.grow(self._needed * threads)
        if (there := (workspace.address, workspace.size, threads)) != self._there:
            for array in self._arrays:
                array[-3:] = there
            self._there = there
        for array, place, number in self._open:
            array[place] = addresses[number]
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
            at = max(at, -(-high // _LINE) * _LINE)
        found.append(at)
        end = max(end, at + size)
    return found, end
