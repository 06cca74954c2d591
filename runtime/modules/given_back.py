"""Gives memory back to the system after a compilation, because a model is compiled once and then runs for long.

heap        MLIR and LLVM free hundreds of thousands of small pieces; glibc keeps those between pieces still in use
libraries   each compiler has read two thirds of its hundred megabytes of code and tables. Nobody has written to these pages, so
            the next compilation reads them again from their files, mostly from the system's cache
"""

import ctypes
import functools
import sys
from collections.abc import Iterator

_LIBRARIES = {"llvmlite.binding": "libllvmlite", "torch_mlir._mlir_libs": "libTorchMLIRAggregateCAPI"}
"""The libraries, by the module that loads them. They are never unloaded."""

_MADV_DONTNEED = 4  # linux/mman.h


def give_back() -> None:
    """Call this after a graph or a kernel was compiled. Takes 2 ms. Does nothing on systems other than Linux."""
    if sys.platform != "linux":
        return
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):  # glibc
        system.malloc_trim(0)
    for start, end in _places(tuple(library for module, library in _LIBRARIES.items() if module in sys.modules)):
        # madvise may refuse; then the pages stay.
        system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


@functools.cache
def _places(libraries: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Returns the unmodified address ranges of loaded libraries. Cached: they do not move, and Linux takes 10 ms or more to
    list them.
    """
    try:
        with open("/proc/self/smaps") as file:
            return tuple(_untouched(file, libraries))
    except OSError:
        return ()


def _untouched(smaps: Iterator[str], libraries: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yields the address ranges of libraries whose memory equals their files: read-only, and no page was ever written to.

    The loader writes to some ranges before it protects them. Their pages are in no file, so Linux counts them as "Anonymous".
    """
    here: tuple[int, int] | None = None
    for line in smaps:
        first, *rest = line.split()
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            ours = len(rest) == 5 and rest[4].rpartition("/")[2].startswith(libraries) and rest[0][1] == "-"
            here = (int(start, 16), int(end, 16)) if ours else None
        elif first == "Anonymous:" and here is not None and rest[0] == "0":
            yield here
