"""What message passing gains by a sparse matrix, and whether there are kernels for it."""

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
"""Elements of gathered rows that a product takes in the time in which gather and scatter move one."""
_SORT = 55.0
_SORT_CALLS = 10
"""Elements that gather and scatter move in the time in which an edge is sorted, and calls in that in which any list is."""

_SCORE = 16
"""The same for a score: two gathers, a maximum, an exponential, a sum and a division of each edge and head are left out. Over
edges by the thousand it is 26, over those by the hundred thousand, where gathered rows come from memory, 7 (Zen 5)."""
_FEW_HEADS, _ATTENTION = 9, 100e3
"""Elements in the time of an edge of attention with few heads, its lanes, and in that of its call beside a product's."""


def gains(found: Messages, edges: int, leaves: Sequence[fx.Node], uses: int, heads: int) -> tuple[float, float]:
    """The predicted gain, and what it would be if nothing had to be sorted.

    leaves  what the edge list is computed from
    uses    how many operations use it
    heads   of an attention, which computes so many scores for each edge; 0 for anything else
    """
    features = prod(hint(size) or 1 for size in found.message.meta["val"].shape[1:])
    moved = edges * (features + _SCORE * heads)
    call = device_of(found.node.meta["val"].device).edge_call
    attending = edges * max(_SCORE * heads / _GAIN, _FEW_HEADS) + _ATTENTION if heads else 0.0
    product = edges * features / _GAIN + attending + call
    # A list whose size is left open is most likely another one at every call, and is sorted for it.
    is_open = any(isinstance(size, torch.SymInt) for leaf in leaves for size in leaf.meta["val"].shape)
    sorting = (_SORT * edges + _SORT_CALLS * call) / max(1, uses) if is_open else 0.0
    return moved / (product + sorting), moved / product


@lru_cache
def missing_kernel(dtype: torch.dtype, schedule: str, place: torch.device) -> CompileError | None:
    """Why a schedule has no kernel for this type; None if there is one, ready to run."""
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
