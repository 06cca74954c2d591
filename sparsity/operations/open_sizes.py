"""Sizes that a graph learns only when it runs, such as the number of nodes that a mask keeps: what is assumed of them.

Outside of graphs, and for sizes that a graph knows, these are plain comparisons.
"""

from typing import Any

import torch

from gossamer.runtime.torch_internals import check_in_graph, guard_or_true


def agree(one: Any, other: Any) -> bool:
    """Whether two sizes are equal. If a graph learns that only when it runs, it counts as true, and the graph checks it."""
    same = one == other
    if isinstance(same, bool) and not torch.compiler.is_compiling():  # which torch 2.11 denies while it computes fake results
        return same
    if not guard_or_true(same):
        return False
    check_in_graph(same)
    return True


def is_one(size: Any) -> bool:
    """Whether a size is 1, and so may broadcast. One that a graph does not know is taken to be larger, as torch takes it."""
    return not guard_or_true(size != 1)


def is_zero(size: Any) -> bool:
    """Whether a size is 0. One that a graph does not know is taken to be larger."""
    return not guard_or_true(size != 0)
