"""Asks the families of schedules whether and how their products run in a chain, and what that gains."""

from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES

_QUAD = 4  # features whose bytes lie side by side in a tile


def chain_product(op: Any) -> ChainProduct:
    """Returns how a kernel.spmm runs in a chain. CompileError if its family does not run in chains."""
    able = {name: family.chain for name, family in FAMILIES.items() if family.chain is not None}
    schedule = ir.StringAttr(op.schedule).value
    if schedule not in able:
        raise CompileError(f"no chain has a product of the schedule {schedule}, but of {', '.join(able)}")
    return able[schedule](op)


def runs_in_chains(schedule: str, matrix: Matrix) -> bool:
    """Whether a product with this weight can run in a chain by a schedule. There it must not read columns beyond the last of x,
    so the columns must be a multiple of those that the packing stores together."""
    family = FAMILIES.get(schedule)
    able = family is not None and family.chain is not None and family.needs <= matrix.features
    stored = family.stores(matrix, chain=True) if family is not None and able else None
    if family is None or stored is None:
        return False
    together = stored.neighbours if isinstance(stored, Packing) else 1
    return matrix.columns % max(together, _QUAD if family.integers else 1) == 0


def gain_in_chain(schedule: str, matrix: Matrix, tokens: int) -> float:
    """Returns about how many times as fast a product is in a chain."""
    return FAMILIES[schedule].gain(matrix, max(tokens, 1))
