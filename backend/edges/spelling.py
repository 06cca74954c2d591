"""The parts of attention over edges, in words that all spellings of it have.

A spelling says what a node computes in these words: gather and scatter over an edge list (`messages/message_edges.py`), or
operations on SparseTensors (`operations/sparse_edges.py`). `scores.py` and `attention.py` say once what attention is.

An edge goes from a node on the side "source" to one on the side "target"; softmax and sums are by targets.
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
    """The node before copies and views that keep its rows."""
    node = same(node)
    while node.target in _VIEWS and as_long(node.args[0], node):
        node = same(node.args[0])
    return node


@dataclass(frozen=True)
class PerNode:
    """A tensor with a row for each node of a side, or for each edge.

    across  whether it is a matrix that has columns for them instead
    once    whether it has one value for all of them instead
    """

    tensor: fx.Node
    across: bool = False
    once: bool = False

    def read(self, trail: list[Any], emit: Emitter) -> fx.Node:
        """It as [nodes, *trail], or as [*trail]."""
        now = emit(aten.permute.default, self.tensor, [1, 0]) if self.across else self.tensor
        rows = [] if self.once else emit.sizes(now, (0,))
        if equal_sizes(now.meta["val"].shape[len(rows) :], trail):
            return now
        return emit(aten.reshape.default, now, [*rows, *trail])

    def written(self, found: fx.Node, emit: Emitter) -> fx.Node:
        """What takes its place, made of the same numbers as `read` gives them."""
        shape = self.tensor.meta["val"].shape
        rows = [] if self.once else emit.sizes(found, (0,))
        trail = shape[:1] if self.across else shape[len(rows) :]
        if not equal_sizes(found.meta["val"].shape[len(rows) :], trail):
            found = emit(aten.reshape.default, found, [*rows, *trail])
        return emit(aten.permute.default, found, [1, 0]) if self.across else found


@dataclass(frozen=True, eq=False)
class Product:
    """For each edge and head the dot product of a query and a key:

    <queries[target], keys[source]>        or, with a direction,        <direction, leaky_relu(queries[target] + keys[source])>

    queries    [targets, heads, size] and `keys` [sources, heads, size], with heads and size as one dimension or two
    slope      of leaky_relu
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
    shift    what is subtracted from them by targets, as far as the graph says it
    """

    of: fx.Node
    shift: fx.Node | None = None


@dataclass(frozen=True, eq=False)
class Sum:
    """For each target the sum over its edges of values of their sources, times weights.

    result  one row a target
    values  one row a source
    weight  one number an edge and head
    """

    result: PerNode
    values: PerNode
    weight: fx.Node


class Edges(Protocol):
    """The edges of one attention, as they are spelled."""

    def gathered(self, node: fx.Node) -> tuple[str, PerNode] | None:
        """The side whose nodes a tensor of edges has the rows of, and the tensor of nodes."""

    def product(self, node: fx.Node) -> Product | None:
        """The product of queries and keys that a node is."""

    def softmax(self, node: fx.Node) -> Softmax | None:
        """The softmax that a node is."""


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
