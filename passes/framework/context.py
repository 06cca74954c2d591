"""The one place where MLIR contexts are made."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch_mlir import ir

import gossamer.dialects.attention
import gossamer.dialects.bags
import gossamer.dialects.cached_attention
import gossamer.dialects.convolution
import gossamer.dialects.edges
import gossamer.dialects.experts
import gossamer.dialects.heads
import gossamer.dialects.kept_steps
import gossamer.dialects.open_ops
import gossamer.dialects.points
import gossamer.dialects.row_maps
import gossamer.dialects.token_tiles  # noqa: F401  # ops belong to the dialect as soon as they are defined
from gossamer.dialects.kernel import KernelDialect

_MODULES = 500  # that are built in one context: what it keeps of each, types and maps, is a few kilobytes

_loading = threading.Lock()  # a Python-defined dialect is loaded by way of its class, which all threads share
_building = threading.local()


def context() -> ir.Context:
    """A new MLIR context with every dialect of MLIR and the kernel dialect loaded (10 ms); not entered."""
    fresh = ir.Context()
    with _loading, fresh, ir.Location.unknown():
        KernelDialect.load()
    return fresh


@contextmanager
def building() -> Iterator[None]:
    """To build a module in whose text is all that is kept: in a context that the thread has for that, at an unknown location.

    Building most contract IR takes less time than making a context. No pass may run in this one: it has no threads, so that a
    process that is forked can let go of it.
    """
    if getattr(_building, "left", 0) == 0:
        _building.context, _building.left = context(), _MODULES
        _building.context.enable_multithreading(False)
    _building.left -= 1
    with _building.context, ir.Location.unknown():
        yield
