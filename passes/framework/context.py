"""Makes the MLIR contexts. No other file of Gossamer does."""

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
import gossamer.dialects.token_tiles  # noqa: F401  # importing the file adds its ops to the dialect
from gossamer.dialects.kernel import KernelDialect

_MODULES = 500  # number of modules built in one context, which keeps a few kilobytes of types and maps of each

_loading = threading.Lock()  # loading a dialect that is defined in Python changes its class, which all threads share
_building = threading.local()


def context() -> ir.Context:
    """Returns a new MLIR context with all dialects of MLIR and the kernel dialect, not entered. This takes 10 ms."""
    fresh = ir.Context()
    with _loading, fresh, ir.Location.unknown():
        KernelDialect.load()
    return fresh


@contextmanager
def building() -> Iterator[None]:
    """Enters a context, which the thread reuses, to build a module of which only the text is kept. Locations are unknown.

    The context is reused because building contract IR mostly takes less time than making a context. Run no pass in it: it has
    no threads, so that a forked process can release it.
    """
    if getattr(_building, "left", 0) == 0:
        _building.context, _building.left = context(), _MODULES
        _building.context.enable_multithreading(False)
    _building.left -= 1
    with _building.context, ir.Location.unknown():
        yield
