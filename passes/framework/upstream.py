"""MLIR's own passes, by its textual pipeline syntax.

A pass manager holds one piece of a pipeline. Making one takes a microsecond; what costs time is setting up
the patterns of a pass (0.25 ms for canonicalize), which MLIR does for every pass of every manager. So one
manager for a whole pipeline would save little, and it would not tell which pass failed.
"""

from torch_mlir import ir
from torch_mlir.passmanager import PassManager


def check(piece: str) -> None:
    """ValueError with MLIR's reason if it does not know this piece of a pipeline."""
    PassManager.parse(f"builtin.module({piece})", ir.Context(load_on_create_dialects=[]))


def run(piece: str, module: ir.Module) -> None:
    """Run a piece of a pipeline on a module; MLIRError if it fails."""
    PassManager.parse(f"builtin.module({piece})", module.context).run(module.operation)
