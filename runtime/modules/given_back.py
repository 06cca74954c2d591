"""Memory that compiling leaves behind, given back to the system: a model is compiled once and runs for long.

heap        MLIR and LLVM free hundreds of thousands of small pieces; glibc keeps what lies between those still in use
libraries   two thirds of a hundred megabytes of each compiler's code and tables have been read. Nobody has written to those
            pages, so that they are read again from their files, mostly from memory, should something be compiled again
"""

import ctypes
import functools
import sys
from collections.abc import Iterator

_LIBRARIES = {"llvmlite.binding": "libllvmlite", "torch_mlir._mlir_libs": "libTorchMLIRAggregateCAPI"}
"""By the modules that load them, which never unload them."""

_MADV_DONTNEED = 4  # linux/mman.h


def give_back() -> None:
    """To be called when a graph or a kernel has been compiled: takes 2 ms. Does nothing on other systems than Linux."""
    if sys.platform != "linux":
        return
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):  # glibc
        system.malloc_trim(0)
    for start, end in _places(tuple(library for module, library in _LIBRARIES.items() if module in sys.modules)):
        # An advice: where it is refused, the pages stay.
        system.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


@functools.cache
def _places(libraries: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """What is untouched of libraries that are loaded: they stay where they are, and Linux takes 10 ms and more to tell."""
    try:
        with open("/proc/self/smaps") as file:
            return tuple(_untouched(file, libraries))
    except OSError:
        return ()


def _untouched(smaps: Iterator[str], libraries: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Where libraries lie in memory that holds what their files do: it may not be written to, and no page of it ever was.

    One that was written to before it was protected, as the loader does, has pages that are in no file.
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
