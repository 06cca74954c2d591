"""Maxima and minima over an edge list, with their gradients.

    %y = scatter_reduce(zeros, 0, %target, index_select(%x, 0, %source), "amax", include_self=False)

In a joint graph the gradient goes to those that are equal to the maximum, in equal shares:

    %m = mul(eq(index_select(%x, …), gather(%y, …)), gather(div(%g, %ties), …));  scatter_add(zeros, 0, %source, %m)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import as_long, is_backward, of_tensors, same, same_shape
from gossamer.backend.messages.message_edges import EdgeIndex
from gossamer.backend.messages.message_patterns import Aggregation, gather_at, repeated, zeros_of
from gossamer.sparsity.edges.edge_extremes import MOST_FEATURES

aten = torch.ops.aten

_KINDS = {"amax": "max", "amin": "min"}
_CONVERSIONS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True)
class Extreme:
    """For each target the maximum ("max") or minimum ("min") of messages over its edges, 0 where there are none.

    aggregation  it, as if it were a sum
    features     of a message
    of_x         in a joint graph: the gradient of what is gathered, and `gradient` that of the result
    """

    aggregation: Aggregation
    kind: str
    features: int
    of_x: fx.Node | None = None
    gradient: fx.Node | None = None


def extremes(graph: fx.Graph, found: Sequence[Aggregation], structure: Structure) -> Iterator[Extreme]:
    """All of a graph; `found` are its sums."""
    for node in graph.nodes:
        extreme = _extreme(node, structure) if node.target is aten.scatter_reduce.two else None
        if extreme is not None:
            yield _with_gradient(extreme, found, structure)


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
    if not same_shape(node.args[2], message) or not isinstance(features, int) or not 0 < features <= MOST_FEATURES:
        return None
    gather = gather_at(message, structure)
    if gather is not None and not same_shape(same(message), message):
        gather = None
    return Extreme(Aggregation(node, index, gather, (), message, None, size, False), _KINDS[str(kind)], features)


def _with_gradient(extreme: Extreme, found: Sequence[Aggregation], structure: Structure) -> Extreme:
    if extreme.aggregation.gather is None:
        return extreme
    source, target = (EdgeIndex(i, structure) for i in (extreme.aggregation.gather.index, extreme.aggregation.target))
    for each in found:
        if is_backward(each.node) and each.gather is None and each.base is None and not each.mean and source.is_(each.target):
            gradient = _gradient(same(each.message), extreme.aggregation, target, structure)
            if gradient is not None:
                return Extreme(extreme.aggregation, extreme.kind, extreme.features, each.node, gradient)
    return extreme


def _gradient(message: fx.Node, of: Aggregation, target: EdgeIndex, structure: Structure) -> fx.Node | None:
    """The gradient of the result, if this is the gradient of its messages."""
    if message.target is not aten.mul.Tensor or not of_tensors(message):
        return None
    for equal, share in (message.args, message.args[::-1]):
        shared = gather_at(share, structure)  # type: ignore[arg-type]
        if not _is_equal(equal, of, target, structure) or shared is None or not target.is_(shared.index):
            continue
        quotient = same(shared.x)
        if quotient.target is aten.div.Tensor and _is_ties(same(quotient.args[1]), of, target, structure):
            return same(quotient.args[0])
    return None


def _is_ties(node: fx.Node, of: Aggregation, target: EdgeIndex, structure: Structure) -> bool:
    """Whether this counts what is equal to the result, the 0 that it began with included."""
    if node.target is not aten.scatter_add.default:
        return False
    base, dim, index, counted = node.args
    start, index = _unconverted(base), repeated(index)
    begins = start.target is aten.eq.Tensor and any(
        zeros_of(zeros) is not None and result is of.node for zeros, result in permutations(same(a) for a in start.args)
    )
    if dim != 0 or not begins or index is None:
        return False
    return target.is_(index) and _is_equal(counted, of, target, structure)


def _is_equal(node: Any, of: Aggregation, target: EdgeIndex, structure: Structure) -> bool:
    node = _unconverted(node)
    if node.target is not aten.eq.Tensor or not of_tensors(node):
        return False
    for message, result in (node.args, node.args[::-1]):
        gather = gather_at(result, structure)
        if same(message) is same(of.message) and gather is not None and target.is_(gather.index):
            return same(gather.x) is of.node
    return False


def _unconverted(node: Any) -> Any:
    node = same(node)
    return same(node.args[0]) if node.target in _CONVERSIONS else node
