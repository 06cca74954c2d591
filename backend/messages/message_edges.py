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
    ancestors,
    as_long,
    equal_sizes,
    is_backward,
    of_tensors,
    same,
    same_dtype,
    same_shape,
    users,
)  # fmt: skip
from gossamer.backend.messages.message_patterns import Aggregation, Gather, aggregation_at, gather_at, repeated

aten = torch.ops.aten

_LEAST = -1e30
"""What maxima may begin with: below all scores, unless a mask is part of them."""


class EdgeIndex:
    """An edge list, to be found again in other nodes; None, the edges themselves, is found in none."""

    def __init__(self, node: fx.Node | None, structure: Structure) -> None:
        self.node, self._structure = node, structure
        self._known = None if node is None else self._identity(node)

    def is_(self, node: fx.Node | None) -> bool:
        """Whether this is computed in the same way."""
        return node is not None and self._identity(node) == self._known

    def _identity(self, node: fx.Node) -> tuple[Any, ...]:
        expression = self._structure.cut(rows_of(node))
        return expression.key, expression.leaves, expression.numbers


class MessageEdges:
    """Those over which an aggregation sums weighted rows; `found` are all aggregations of the graph."""

    def __init__(self, aggregation: Aggregation, weight: fx.Node, found: Sequence[Aggregation], structure: Structure) -> None:
        assert aggregation.gather is not None
        self.aggregation, self._values = aggregation, aggregation.gather
        self._weight, self._found, self._structure = weight, found, structure
        self.source = EdgeIndex(self._values.index, structure)
        self.target = EdgeIndex(aggregation.target, structure)

    @classmethod
    def of(cls, aggregation: Aggregation, found: Sequence[Aggregation], structure: Structure) -> "MessageEdges | None":
        """Those of an aggregation of rows that are gathered, or of values of edges, times one weight for each edge and head."""
        if aggregation.base is not None or aggregation.mean or is_backward(aggregation.node):
            return None
        if aggregation.message.meta["val"].dtype not in (torch.float32, torch.float64):
            return None
        if aggregation.gather is not None:
            factors = aggregation.factors
            one = len(factors) == 1 and not factors[0].inverse
            return cls(aggregation, factors[0].node, found, structure) if one else None
        message = rows_of(aggregation.message)
        for values, factor in _factors(message):
            broadcast = not same_shape(factor, message) and factor.meta["val"].dim() == message.meta["val"].dim()
            dropout = dropout_at(rows_of(factor))
            whole = rows_of(factor) if dropout is None else dropout.of
            if broadcast and same_shape(values, message) and whole.target is aten.div.Tensor:
                return cls(replace(aggregation, gather=Gather(values, None), message=message), factor, found, structure)
        return None

    @property
    def forward(self) -> Sum:
        """The aggregation."""
        return Sum(PerNode(self.aggregation.node), "target", PerNode(self._values.x), (self._weight,))

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
                return Product(node, *pair, shape[-1])
            joined, slope = before_leaky_relu(left)
            if joined.target is not aten.add.Tensor or not of_tensors(joined) or joined.kwargs or right in self._structure:
                continue
            pair = self._pair([same(a) for a in joined.args], product)
            fits = same_shape(joined, product) and same_dtype(joined, product)
            if pair is not None and fits and _is_for_all_edges(right, product):
                return Product(node, *pair, shape[-1], joined, slope, right)
        return None

    def _pair(self, nodes: Sequence[fx.Node], like: fx.Node) -> tuple[PerNode, PerNode] | None:
        """Queries and keys, if nodes are gathered from both sides."""
        found = [self.gathered(node) for node in nodes if same_shape(node, like) and same_dtype(node, like)]
        by = dict(each for each in found if each is not None)
        return (by["target"], by["source"]) if len(by) == len(nodes) == 2 else None

    def backward_sums(self) -> Iterator[Sum]:
        """Aggregations in backward, of gathered rows or of what edges have; and the gradient of values that edges have."""
        for each in self._found:
            if not is_backward(each.node) or each.base is not None or each.mean:
                continue
            side, other = ("source", self.target) if self.source.is_(each.target) else ("target", self.source)
            if side == "target" and not self.target.is_(each.target):
                continue
            result = PerNode(each.node)
            yield Sum(result, side, None, (each.message,))
            if each.gather is not None and other.is_(each.gather.index) and not any(f.inverse for f in each.factors):
                yield Sum(result, side, PerNode(each.gather.x), tuple(f.node for f in each.factors))
        if self._values.index is None:
            yield from self._of_values_of_edges()

    def _of_values_of_edges(self) -> Iterator[Sum]:
        """Each edge is a source of its own: a sum over one edge."""
        for node in self.aggregation.node.graph.nodes:
            if not is_backward(node) or not same_shape(node, self.aggregation.message):
                continue
            for of_result, factor in _factors(node):
                gather = gather_at(of_result, self._structure)
                if gather is not None and self.target.is_(gather.index):
                    yield Sum(PerNode(node), "source", PerNode(gather.x), (factor,))

    def softmax(self, node: fx.Node) -> Softmax | None:
        """What weights are the softmax of by targets."""
        if node.target is not aten.div.Tensor or not of_tensors(node):
            return None
        exponential = same(node.args[0])
        gathered, added_there = _beside_a_number(node.args[1])  # type: ignore[arg-type]
        total = gather_at(gathered, self._structure)
        if exponential.target is not aten.exp.default or total is None or not self.target.is_(total.index):
            return None
        summed, added = _beside_a_number(total.x)
        added += added_there
        sums = aggregation_at(summed, self._structure)
        if sums is None or same(sums.message) is not exponential or sums.base is not None or sums.mean:
            return None
        logits, shift = same(exponential.args[0]), None
        if logits.target is aten.sub.Tensor and of_tensors(logits) and not logits.kwargs:
            shift = gather_at(logits.args[1], self._structure)  # type: ignore[arg-type]
            if shift is not None and self.target.is_(shift.index):
                logits = same(logits.args[0])
        rounded_away = torch.finfo(exponential.meta["val"].dtype).eps / 2  # beside a sum of 1 or more
        negligible = shift is not None and 0 <= added <= rounded_away and self._is_maximum(same(shift.x), logits)
        if not self.target.is_(sums.target) or not (added == 0 or negligible):
            return None
        return Softmax(logits, _of_exponential(exponential, None if shift is None else shift.x))

    def _is_maximum(self, node: fx.Node, of: fx.Node) -> bool:
        """Whether this is the maximum by targets, so that the exponentials add up to 1 or more."""
        if node.target is not aten.scatter_reduce.two or node.args[4] != "amax":
            return False
        base, dim, index, source = node.args[:4]
        index = repeated(index)
        if dim != 0 or same(source) is not of or index is None or not self.target.is_(index):
            return False
        if not node.kwargs.get("include_self", True):
            return True
        least: Any = base.args[1] if base.target is aten.full.default else 0  # type: ignore[union-attr]
        if least <= torch.finfo(node.meta["val"].dtype).min:
            return True
        return least <= _LEAST and not any(number < least for each in ancestors([of]) for number in _numbers(each))


def _beside_a_number(node: fx.Node) -> tuple[fx.Node, float]:
    """What a number is added to, against division by zero, and the number, 0 if there is none."""
    node = same(node)
    if node.target is aten.add.Tensor and isinstance(node.args[1], float) and not node.kwargs:
        return same(node.args[0]), node.args[1]
    return node, 0.0


def _factors(product: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two that a node multiplies, in both orders."""
    if product.target is aten.mul.Tensor and of_tensors(product):
        yield from permutations([same(a) for a in product.args], 2)


def _of_exponential(exponential: fx.Node, shift: fx.Node | None) -> tuple[fx.Node, ...]:
    """The gradients of what the exponential is of: all of the scores' if none comes by way of the shift."""
    if shift is not None and any(is_backward(user) for user in users(shift)):
        return ()
    backward = (user for user in users(exponential) if is_backward(user))
    return tuple(each for each in backward if [left is exponential for left, _ in _factors(each)].count(True) == 1)


def _numbers(node: fx.Node) -> Iterator[float]:
    """Those that a node is computed from."""
    return (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float))


def _is_for_all_edges(direction: fx.Node, product: fx.Node) -> bool:
    """Whether a direction is the same for all edges."""
    own, whole = direction.meta["val"].shape, product.meta["val"].shape
    if not same_dtype(direction, product):
        return False
    return equal_sizes(own, whole[1:]) or equal_sizes(own, (1, *whole[1:]))
