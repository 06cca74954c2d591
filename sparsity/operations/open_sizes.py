"""Compares sizes that a graph learns only when it runs, such as the number of nodes that a mask keeps, by assumptions.

In eager code, and for sizes that a graph knows, these are plain comparisons.
"""

from typing import Any

import torch

from gossamer.runtime.modules import sizes
from gossamer.runtime.torch_internals import check_in_graph


def agree(one: Any, other: Any) -> bool:
    """Whether two sizes are equal. For open sizes it returns True, and the graph checks it at run time."""
    if not torch.compiler.is_compiling():
        return bool(one == other)
    if not sizes.guard_or_true(one == other):
        return False
    check_in_graph(one == other)
    return True


def is_one(size: Any) -> bool:
    """Whether a size is 1, so that it may broadcast. Open sizes count as larger, as in torch."""
    return not sizes.guard_or_true(size != 1)


def is_zero(size: Any) -> bool:
    """Whether a size is 0. Open sizes count as larger."""
    return not sizes.guard_or_true(size != 0)


def divisor(size: Any) -> Any:
    """Returns a size to divide by: itself, or 1 for 0."""
    return torch.sym_max(int(size) if isinstance(size, torch.Tensor) else size, 1)  # a tensor while torch.jit.trace runs
