"""The one place where MLIR contexts are made."""

import threading

from torch_mlir import ir

import gossamer.dialects.attention
import gossamer.dialects.cached_attention
import gossamer.dialects.convolution
import gossamer.dialects.edges
import gossamer.dialects.open_ops
import gossamer.dialects.points
import gossamer.dialects.token_tiles  # noqa: F401  # ops belong to the dialect as soon as they are defined
from gossamer.dialects.kernel import KernelDialect

_loading = threading.Lock()  # a Python-defined dialect is loaded by way of its class, which all threads share


def context() -> ir.Context:
    """A new MLIR context with every dialect of MLIR and the kernel dialect loaded (5 ms); not entered."""
    fresh = ir.Context()
    with _loading, fresh, ir.Location.unknown():
        KernelDialect.load()
    return fresh
