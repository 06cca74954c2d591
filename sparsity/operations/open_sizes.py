"""Sizes that a graph learns only when it runs, such as the number of nodes that a mask keeps: what is assumed of them.

Outside of graphs, and for sizes that a graph knows, these are plain comparisons.
"""

from typing import Any

import torch

from gossamer.runtime.torch_internals import check_in_graph, guard_or_true


def agree(one: Any, other: Any) -> bool:
    """Whether two sizes are equal. If a graph learns that only when it runs, it counts as true, and the graph checks it."""
    if not torch.compiler.is_compiling():
        return bool(one == other)
    if not guard_or_true(one == other):
        return False
    check_in_graph(one == other)
    return True


def is_one(size: Any) -> bool:
    """Whether a size is 1, and so may broadcast. One that a graph does not know is taken to be larger, as torch takes it."""
    return not guard_or_true(size != 1)


def is_zero(size: Any) -> bool:
    """Whether a size is 0. One that a graph does not know is taken to be larger."""
    return not guard_or_true(size != 0)
