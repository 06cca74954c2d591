"""Recognises the parts of attention that is written with gather and scatter, as the protocol of `edges/spelling.py`.

    (q[target] * k[source]).sum(-1)                                          product of queries and keys
    (leaky_relu(q[target] + k[source]) * direction).sum(-1)                  the same with a direction
    zeros.index_add(0, target, x[source] * w)                                sum of w times x

`message_softmax.py` has the spellings of the softmax w.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import torch
from torch import fx

from gossamer.backend.edges.leaky_relu import before_leaky_relu
from gossamer.backend.edges.spelling import PerNode, Product, Softmax, Sum, rows_of
from gossamer.backend.graph.dropout import dropout_at
from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import alike, as_long, equal_sizes, is_backward, of_tensors, same, same_dtype, same_shape
from gossamer.backend.graph.patterns import LAST, Behind, Call, Hole, Named, Pattern, match, one_of
from gossamer.backend.messages.message_patterns import Aggregation, EdgeIndex, Gather, gather_at, unexpanded, weighs
from gossamer.backend.messages.message_softmax import Softmaxes

aten = torch.ops.aten


class MessageEdges:
    """The edges over which an aggregation sums weighted rows. Raises Refused if the weights only look like a softmax."""

    def __init__(self, aggregation: Aggregation, weight: fx.Node, structure: Structure) -> None:
        assert aggregation.gather is not None
        self.aggregation, self._values = aggregation, aggregation.gather
        self._weight, self._structure = weight, structure
        self.source = EdgeIndex(self._values.index, structure)
        self.target = EdgeIndex(aggregation.target, structure)
        self._softmaxes = Softmaxes(self.target, structure)
        q, k = self._at("target", Hole("queries")), self._at("source", Hole("keys"))
        active = Named("active", Behind(lambda node: before_leaky_relu(node)[0], Named("pair", q + k)))
        self._products = _sum_of_last(Named("whole", one_of(Named("pair", q * k), active * Hole("direction", _is_tensor))))
        whole = rows_of(weight)
        dropout = dropout_at(whole)
        self._divided = self._softmaxes.of_quotient(aggregation.node, whole if dropout is None else dropout.of)

    @classmethod
    def of(cls, aggregation: Aggregation, structure: Structure) -> "MessageEdges | None":
        """Returns the edges of an aggregation of gathered rows, or of edge values, times one weight for each edge and head.

        Returns None for other aggregations.
        """
        if not aggregation.plain or is_backward(aggregation.node):
            return None
        if aggregation.message.meta["val"].dtype not in (torch.float32, torch.float64):
            return None
        message = rows_of(aggregation.message)
        for gathers in (True, False):
            for values, factor in _factors(message):
                gather = gather_at(values, structure) if gathers else Gather(values, None)
                weight = unexpanded(factor)
                if gather is not None and same_shape(values, message) and weighs(weight, message):
                    return cls(replace(aggregation, gather=gather, message=message), weight, structure)
        return None

    @property
    def forward(self) -> Sum:
        """The aggregation as a weighted sum."""
        result = self.aggregation.node if self._divided is None else self._divided[1]
        return Sum(PerNode(result), PerNode(self._values.x), self._weight)

    def gathered(self, node: fx.Node) -> tuple[str, PerNode] | None:
        """Returns the side from whose nodes rows are gathered, and the gathered tensor; None for other nodes."""
        gather = gather_at(node, self._structure)
        if gather is None:
            return None
        # All gathers must use this edge list, which is checked once.
        if self.source.is_(gather.index) and as_long(gather.x, self._values.x):
            return "source", PerNode(gather.x)
        if self.target.is_(gather.index) and as_long(gather.x, self.aggregation.node):
            return "target", PerNode(gather.x)
        return None

    def product(self, node: fx.Node) -> Product | None:
        """Returns the product of queries and keys that a sum over the last dimension is, else None."""
        found = match(self._products, rows_of(node))
        if found is None:
            return None
        whole, pair, direction = found["whole"], found["pair"], found.get("direction")
        size = whole.meta["val"].shape[-1]
        fits = isinstance(size, int) and same_shape(pair, whole) and all(same_dtype(each, whole) for each in (node, pair))
        if not fits or not alike(pair) or (direction is not None and not self._is_for_all(direction, whole)):
            return None
        slope = before_leaky_relu(found["active"])[1] if direction is not None else 1.0
        return Product(PerNode(found["queries"]), PerNode(found["keys"]), size, slope, direction)

    def _at(self, side: str, of: Hole) -> Pattern:
        """Returns the pattern of[target] or of[source]."""

        def step(node: fx.Node) -> fx.Node | None:
            found = self.gathered(node)
            return found[1].tensor if found is not None and found[0] == side else None

        return Behind(step, of)

    def _is_for_all(self, direction: fx.Node, whole: fx.Node) -> bool:
        """Whether a direction is the same for all edges."""
        own, shape = direction.meta["val"].shape, whole.meta["val"].shape
        fits = equal_sizes(own, shape[1:]) or equal_sizes(own, (1, *shape[1:]))
        return fits and same_dtype(direction, whole) and direction not in self._structure

    def softmax(self, node: fx.Node) -> Softmax | None:
        """Returns the softmax by targets that weights are, else None."""
        return self._divided[0] if self._divided is not None else self._softmaxes.at(node)


def _is_tensor(value: object) -> bool:
    return isinstance(value, fx.Node)


def _sum_of_last(x: Pattern) -> Pattern:
    return Call((aten.sum.dim_IntList,), (x, LAST), and_more=True)


def _factors(product: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields the two factors of a product, in both orders."""
    if product.target is aten.mul.Tensor and of_tensors(product):
        yield from permutations([same(a) for a in product.args], 2)
