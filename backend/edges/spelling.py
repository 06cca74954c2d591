"""What attention over edges is made of, in words that all spellings of it have.

A spelling says what a node computes in these words: gather and scatter over an edge list (`messages/message_edges.py`), or
operations on SparseTensors (`operations/sparse_edges.py`). What attention is, `scores.py` and `attention.py` say once.

An edge goes from a node on the side "source" to one on the side "target"; softmax and sums are by targets.
"""

from collections.abc import Iterator
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
    """The node before copies and views that keep its rows."""
    node = same(node)
    while node.target in _VIEWS and as_long(node.args[0], node):
        node = same(node.args[0])
    return node


def unexpanded(node: fx.Node) -> fx.Node:
    """The node before views and expansions that keep its rows."""
    node = rows_of(node)
    while node.target is aten.expand.default and as_long(node.args[0], node):
        node = rows_of(node.args[0])  # type: ignore[arg-type]
    return node


@dataclass(frozen=True)
class PerNode:
    """A tensor with a row for each node of a side; `across` if it is a matrix that has columns for them instead."""

    tensor: fx.Node
    across: bool = False

    def read(self, trail: list[Any], emit: Emitter) -> fx.Node:
        """It as [nodes, *trail]."""
        now = emit(aten.permute.default, self.tensor, [1, 0]) if self.across else self.tensor
        if equal_sizes(now.meta["val"].shape[1:], trail):
            return now
        return emit(aten.reshape.default, now, [*emit.sizes(now, (0,)), *trail])

    def written(self, found: fx.Node, emit: Emitter) -> fx.Node:
        """What takes its place, made of the same numbers in rows [nodes, ...]."""
        shape = self.tensor.meta["val"].shape
        trail = shape[:1] if self.across else shape[1:]
        if not equal_sizes(found.meta["val"].shape[1:], trail):
            found = emit(aten.reshape.default, found, [*emit.sizes(found, (0,)), *trail])
        return emit(aten.permute.default, found, [1, 0]) if self.across else found


@dataclass(frozen=True, eq=False)
class Product:
    """For each edge and head the dot product of a query and a key:

    <queries[target], keys[source]>        or, with a direction,        <direction, leaky_relu(queries[target] + keys[source])>

    node       the sum, a number for each edge and head
    queries    [targets, heads, size] and `keys` [sources, heads, size], with heads and size as one dimension or two
    joined     what leaky_relu is applied to, with its slope
    direction  [..., heads, size]
    """

    node: fx.Node
    queries: PerNode
    keys: PerNode
    size: int
    joined: fx.Node | None = None
    slope: float = 1.0
    direction: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Softmax:
    """What a softmax by targets is of, and the nodes of a joint graph that are the gradient of that."""

    of: fx.Node
    gradients: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Sum:
    """For each node of a side the sum over its edges of a product.

    result    one row a node
    gathered  what the product has of each edge's node on the other side, if it has anything
    factors   what else is multiplied, one row an edge
    """

    result: PerNode
    side: str
    gathered: PerNode | None
    factors: tuple[fx.Node, ...]


class Edges(Protocol):
    """The edges of one attention, as they are spelled."""

    def gathered(self, node: fx.Node) -> tuple[str, PerNode] | None:
        """The side whose nodes a tensor of edges has the rows of, and the tensor of nodes."""

    def product(self, node: fx.Node) -> Product | None:
        """The product of queries and keys that a node is."""

    def softmax(self, node: fx.Node) -> Softmax | None:
        """The softmax that a node is."""

    def backward_sums(self) -> Iterator[Sum]:
        """The sums in the backward part of a joint graph."""


@dataclass(frozen=True, eq=False)
class Operation:
    """The operation for attention over some edges, and that for its gradients.

    before  the arguments before the terms: the edges
    after   those after all others
    """

    forward: Any
    backward: Any
    before: list[Any]
    after: list[Any]
