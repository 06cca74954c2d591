"""Maxima and minima over an edge list.

%y = scatter_reduce(zeros, 0, %target, index_select(%x, 0, %source), "amax", include_self=False)        or index_reduce
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import as_long, is_backward, same, same_shape
from gossamer.backend.messages.message_patterns import Aggregation, gather_at, repeated, zeros_of
from gossamer.sparsity.edges.edge_extremes import MOST_FEATURES

aten = torch.ops.aten

_KINDS = {"amax": "max", "amin": "min"}


@dataclass(frozen=True)
class Extreme:
    """For each target the maximum ("max") or minimum ("min") of messages over its edges, 0 where there are none.

    aggregation  it, as if it were a sum
    features     of a message
    """

    aggregation: Aggregation
    kind: str
    features: int


def extremes(graph: fx.Graph, structure: Structure) -> Iterator[Extreme]:
    """All of a graph."""
    for node in graph.nodes:
        extreme = _extreme(node, structure) if node.target in (aten.scatter_reduce.two, aten.index_reduce.default) else None
        if extreme is not None:
            yield extreme


def _extreme(node: fx.Node, structure: Structure) -> Extreme | None:
    base, dim, index, message, kind = node.args[:5]
    index, size, value = repeated(index), zeros_of(base), node.meta["val"]
    if kind not in _KINDS or node.kwargs.get("include_self", True) or dim != 0 or size is None or is_backward(node):
        return None
    if not isinstance(index, fx.Node) or index not in structure or message in structure or not isinstance(message, fx.Node):
        return None
    if value.dtype not in (torch.float32, torch.float64) or value.device.type != "cpu" or not as_long(message, index):
        return None
    features = value.shape[1:].numel()
    whole = node.target is aten.index_reduce.default or same_shape(node.args[2], message)
    if not whole or not isinstance(features, int) or not 0 < features <= MOST_FEATURES:
        return None
    gather = gather_at(message, structure)
    if gather is not None and not same_shape(same(message), message):
        gather = None
    return Extreme(Aggregation(node, index, gather, (), message, None, size, False), _KINDS[str(kind)], features)
