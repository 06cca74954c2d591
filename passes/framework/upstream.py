"""Runs MLIR's own passes, given in its textual pipeline syntax.

Each piece of a pipeline gets a pass manager of its own. Making one takes a microsecond. MLIR sets up the
patterns of every pass of every manager (0.25 ms for canonicalize), so one manager for the whole pipeline
would save little. It would also not tell which pass failed.
"""

from torch_mlir import ir
from torch_mlir.passmanager import PassManager


def check(piece: str) -> None:
    """Raises ValueError with MLIR's reason if MLIR cannot parse this piece of a pipeline."""
    PassManager.parse(f"builtin.module({piece})", ir.Context(load_on_create_dialects=[]))


def run(piece: str, module: ir.Module) -> None:
    """Runs a piece of a pipeline on a module. MLIRError if it fails."""
    PassManager.parse(f"builtin.module({piece})", module.context).run(module.operation)
