"""Predicts how much faster message passing is with a sparse matrix, and finds out whether kernels for it exist.

The unit of time is an element: the time in which gather and scatter move one element of a row.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import fx

from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.nodes import hint
from gossamer.backend.messages.message_patterns import Messages
from gossamer.dialects.errors import CompileError
from gossamer.sparsity.edges.edge_attention import attend_edges
from gossamer.sparsity.edges.sorted_edges import SortedEdges

_GAIN = 3.0
"""Elements of gathered rows that a sparse product processes in one unit of time."""
_SORT = 55.0
_SORT_CALLS = 10
"""Time to sort one edge, in units; and the fixed time of sorting a list, in calls of an operation."""

_SCORE = 16
"""Time that an operation for attention saves for each edge and head: two gathers, a maximum, an exponential, a sum and a
division. On Zen 5 it is 26 with thousands of edges, and 7 with hundreds of thousands, where gathered rows come from memory."""
_FEW_HEADS, _ATTENTION = 9, 100e3
"""Least time of attention for an edge, since few heads leave lanes of vectors idle; and the time of its call beyond a
product's."""


def gains(found: Messages, edges: int, leaves: Sequence[fx.Node], uses: int, heads: int) -> tuple[float, float]:
    """Returns the predicted gain, and the gain if nothing had to be sorted.

    leaves  the inputs that the edge list is computed from
    uses    how many operations use the list
    heads   heads of an attention, which computes one score for each edge and head; 0 for other operations
    """
    features = prod(hint(size) or 1 for size in found.message.meta["val"].shape[1:])
    moved = edges * (features + _SCORE * heads)
    call = device_of(found.node.meta["val"].device).edge_call
    attending = edges * max(_SCORE * heads / _GAIN, _FEW_HEADS) + _ATTENTION if heads else 0.0
    product = edges * features / _GAIN + attending + call
    # A list with an open size most likely changes at every call, and is then sorted again.
    is_open = any(isinstance(size, torch.SymInt) for leaf in leaves for size in leaf.meta["val"].shape)
    sorting = (_SORT * edges + _SORT_CALLS * call) / max(1, uses) if is_open else 0.0
    return moved / (product + sorting), moved / product


@lru_cache
def missing_kernel(dtype: torch.dtype, schedule: str, place: torch.device) -> CompileError | None:
    """Returns why a schedule has no kernel for this type; None if it has one, which is then compiled."""
    one, edge = torch.ones(1, 1, 1, dtype=dtype, device=place), torch.zeros(1, dtype=torch.int64, device=place)
    edges = SortedEdges.of(edge, edge, 1, 1)
    try:
        if schedule == "rows":
            edges.sums(one, one.flatten())
        elif schedule == "sample":
            edges.products(one, one)
        else:
            attend_edges(edges.positions, edges.coordinates, one, source=one[0], target=one[0])
    except CompileError as problem:
        return problem
    return None
