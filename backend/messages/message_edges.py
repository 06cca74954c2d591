"""The edges of attention that is written with gather and scatter, in the words of `edges/spelling.py`.

    %p = exp(sub(%z, index_select(scatter_reduce(…, %target, %z, "amax"), 0, %target)))
    %w = div(%p, index_select(scatter_add(zeros, 0, %target, %p) + 1e-16, 0, %target))         softmax of %z
    %y = scatter_add(zeros, 0, %target, mul(%w, index_select(%x, 0, %source)))                 sum of %w times %x

What is subtracted before the exponential may be any number a target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import fx

from gossamer.backend.edges.leaky_relu import before_leaky_relu
from gossamer.backend.edges.spelling import PerNode, Product, Softmax, Sum, rows_of
from gossamer.backend.graph.dropout import dropout_at
from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import (
    as_long,
    equal_sizes,
    is_backward,
    of_tensors,
    same,
    same_dtype,
    same_shape,
)  # fmt: skip
from gossamer.backend.messages.message_patterns import Aggregation, EdgeIndex, Gather, gather_at, unexpanded, weighs
from gossamer.backend.messages.message_softmax import Softmaxes

aten = torch.ops.aten


class MessageEdges:
    """Those over which an aggregation sums weighted rows. Raises Refused where weights only look like a softmax."""

    def __init__(self, aggregation: Aggregation, weight: fx.Node, structure: Structure) -> None:
        assert aggregation.gather is not None
        self.aggregation, self._values = aggregation, aggregation.gather
        self._weight, self._structure = weight, structure
        self.source = EdgeIndex(self._values.index, structure)
        self.target = EdgeIndex(aggregation.target, structure)
        self._softmaxes = Softmaxes(self.target, structure)
        whole = rows_of(weight)
        dropout = dropout_at(whole)
        self._divided = self._softmaxes.of_quotient(aggregation.node, whole if dropout is None else dropout.of)

    @classmethod
    def of(cls, aggregation: Aggregation, structure: Structure) -> "MessageEdges | None":
        """Those of an aggregation of rows that are gathered, or of values of edges, times one weight for each edge and head."""
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
        """The aggregation."""
        result = self.aggregation.node if self._divided is None else self._divided[1]
        return Sum(PerNode(result), PerNode(self._values.x), self._weight)

    def gathered(self, node: fx.Node) -> tuple[str, PerNode] | None:
        """The side whose nodes rows are gathered from."""
        gather = gather_at(node, self._structure)
        if gather is None:
            return None
        # One edge list, checked once, serves all of them.
        if self.source.is_(gather.index) and as_long(gather.x, self._values.x):
            return "source", PerNode(gather.x)
        if self.target.is_(gather.index) and as_long(gather.x, self.aggregation.node):
            return "target", PerNode(gather.x)
        return None

    def product(self, node: fx.Node) -> Product | None:
        """The product of queries and keys that a sum over the last dimension is."""
        node = rows_of(node)
        if node.target is not aten.sum.dim_IntList:
            return None
        summed, dims, *_ = node.args
        product = same(summed)
        shape: Any = product.meta["val"].shape
        if not shape or dims not in ([-1], [len(shape) - 1]) or not isinstance(shape[-1], int) or not same_dtype(node, product):
            return None
        for left, right in _factors(product):
            pair = self._pair((left, right), product)
            if pair is not None:
                return Product(*pair, shape[-1])
            joined, slope = before_leaky_relu(left)
            if joined.target is not aten.add.Tensor or not of_tensors(joined) or joined.kwargs or right in self._structure:
                continue
            pair = self._pair([same(a) for a in joined.args], product)
            fits = same_shape(joined, product) and same_dtype(joined, product)
            if pair is not None and fits and _is_for_all(right, product):
                return Product(*pair, shape[-1], slope, right)
        return None

    def _pair(self, nodes: Sequence[fx.Node], like: fx.Node) -> tuple[PerNode, PerNode] | None:
        """Queries and keys, if nodes are gathered from both sides."""
        found = [self.gathered(node) for node in nodes if same_shape(node, like) and same_dtype(node, like)]
        by = dict(each for each in found if each is not None)
        return (by["target"], by["source"]) if len(by) == len(nodes) == 2 else None

    def softmax(self, node: fx.Node) -> Softmax | None:
        """What weights are the softmax of by targets."""
        return self._divided[0] if self._divided is not None else self._softmaxes.at(node)


def _factors(product: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two that a node multiplies, in both orders."""
    if product.target is aten.mul.Tensor and of_tensors(product):
        yield from permutations([same(a) for a in product.args], 2)


def _is_for_all(direction: fx.Node, product: fx.Node) -> bool:
    """Whether a direction is the same for all edges."""
    own, whole = direction.meta["val"].shape, product.meta["val"].shape
    if not same_dtype(direction, product):
        return False
    return equal_sizes(own, whole[1:]) or equal_sizes(own, (1, *whole[1:]))
