"""Defines the parts of attention over edges, and the protocol `Edges`, which recognises them in one way of writing attention.

Two classes implement `Edges`: for gather and scatter over an edge list (`messages/message_edges.py`), and for operations on
SparseTensors (`operations/sparse_edges.py`). `scores.py` and `attention.py` use it to recognise attention in both.

An edge goes from a node on the side "source" to a node on the side "target". Softmax and sums are by targets.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import as_long, equal_sizes, same

aten = torch.ops.aten

SIDES = ("target", "source")

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim}


def rows_of(node: fx.Node) -> fx.Node:
    """Returns the node before copies and views that keep its rows."""
    node = same(node)
    while node.target in _VIEWS and as_long(node.args[0], node):
        node = same(node.args[0])
    return node


@dataclass(frozen=True)
class PerNode:
    """A tensor with a row for each node of a side, or for each edge.

    across  whether it is a matrix with columns in place of rows
    once    whether it has a single value for all nodes or edges
    """

    tensor: fx.Node
    across: bool = False
    once: bool = False

    def read(self, trail: list[Any], emit: Emitter) -> fx.Node:
        """Emits the tensor as [nodes, *trail], or as [*trail] if `once`."""
        now = emit(aten.permute.default, self.tensor, [1, 0]) if self.across else self.tensor
        rows = [] if self.once else emit.sizes(now, (0,))
        if equal_sizes(now.meta["val"].shape[len(rows) :], trail):
            return now
        return emit(aten.reshape.default, now, [*rows, *trail])

    def written(self, found: fx.Node, emit: Emitter) -> fx.Node:
        """Emits the inverse of `read`: values as `read` gives them, in the shape of the tensor."""
        shape = self.tensor.meta["val"].shape
        rows = [] if self.once else emit.sizes(found, (0,))
        trail = shape[:1] if self.across else shape[len(rows) :]
        if not equal_sizes(found.meta["val"].shape[len(rows) :], trail):
            found = emit(aten.reshape.default, found, [*rows, *trail])
        return emit(aten.permute.default, found, [1, 0]) if self.across else found


@dataclass(frozen=True, eq=False)
class Product:
    """The dot product of a query and a key for each edge and head:

    <queries[target], keys[source]>        or, with a direction,        <direction, leaky_relu(queries[target] + keys[source])>

    queries    [targets, heads, size], where heads and size may be one dimension
    keys       [sources, heads, size], likewise
    slope      the slope of leaky_relu
    direction  [..., heads, size]
    """

    queries: PerNode
    keys: PerNode
    size: int
    slope: float = 1.0
    direction: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax by targets.

    of       the scores
    shift    the values subtracted from them by targets, if the graph has them
    """

    of: fx.Node
    shift: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum over the edges of each target of the sources' values, times weights.

    result  one row for each target
    values  one row for each source
    weight  one number for each edge and head
    """

    result: PerNode
    values: PerNode
    weight: fx.Node


class Edges(Protocol):
    """Recognises the parts of one attention in its spelling. Each method returns None for other nodes."""

    def gathered(self, node: fx.Node) -> tuple[str, PerNode] | None:
        """Returns the side whose rows a tensor of edges has, and the tensor with a row for each node of that side."""

    def product(self, node: fx.Node) -> Product | None:
        """Returns the product of queries and keys that a node is."""

    def softmax(self, node: fx.Node) -> Softmax | None:
        """Returns the softmax that a node is."""


@dataclass(frozen=True, eq=False)
class Operation:
    """The operation for attention over some edges, and the operation for its gradients.

    before  the arguments before the terms: the edges
    after   the last arguments
    """

    forward: Any
    backward: Any
    before: list[Any]
    after: list[Any]
