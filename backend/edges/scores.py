"""Reads the scores of attention over edges, a number for each edge and head, as a sum of terms.

    leaky_relu(scale * %w * product(%q, %k) + %t[target] + %s[source] + %e, slope)        the product may have a direction

Graph attention networks have %t and %s, graph transformers a product, and GATv2 a product with a direction. %e has all other
terms. The order of terms and factors does not matter, nor do scales in between, or whether products of sums are expanded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gossamer.backend.edges.leaky_relu import before_leaky_relu
from gossamer.backend.edges.spelling import Edges, PerNode
from gossamer.backend.graph.nodes import alike, equal, same, same_dtype, same_shape
from gossamer.backend.graph.patterns import Call, Hole, Number, Rule, apply, match

aten = torch.ops.aten

_MOST_TERMS = 8

Spread = tuple[float, tuple[fx.Node, ...]]
"""A product of a number and nodes."""


def _alpha(node: fx.Node) -> Any:
    return node.kwargs.get("alpha", 1)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor)


_X, _Y, _NUMBER = Hole("x", _is_tensor), Hole("y", _is_tensor), Number("number")

_SUMS = [
    Rule(Call((aten.add.Tensor,), (_X, _Y), and_more=True), lambda node, x, y: [(1.0, x), (_alpha(node), y)]),
    Rule(Call((aten.sub.Tensor,), (_X, _Y), and_more=True), lambda node, x, y: [(1.0, x), (-_alpha(node), y)]),
    Rule(-_X, lambda node, x: [(-1.0, x)]),
    Rule(_X * _NUMBER, lambda node, x, number: [(number, x)]),
    Rule(_X / _NUMBER, lambda node, x, number: [(1 / number, x)] if number else []),
]
"""Rules that split a node into terms, as (factor, node)."""


@dataclass(frozen=True, eq=False)
class Term:
    """A product of a number and tensors."""

    scale: float
    factors: tuple[PerNode, ...]


@dataclass(eq=False)
class Scores:
    """The scores as the terms of the operation.

    raw    the operand of a leaky_relu around everything, or the scores themselves
    slope  the slope of leaky_relu, 1 if there is none
    scale  the factor of the product of queries and keys
    size   the features of a query, None if there is no such product
    terms  the operands of the operation by name, each as a sum
    """

    raw: fx.Node
    slope: float
    scale: float = 1.0
    size: int | None = None
    terms: dict[str, list[Term]] = field(default_factory=dict)

    def add(self, name: str, tensor: PerNode, scale: float = 1.0) -> None:
        """Adds a tensor to a term."""
        self.terms.setdefault(name, []).append(Term(scale, (tensor,)))


def read(node: fx.Node, heads: int, edges: Edges) -> Iterator[Scores]:
    """Yields the ways to read a node as scores, the best first."""
    raw, slope = before_leaky_relu(node)
    if not _is_value(raw, heads):
        return
    scores = Scores(raw, slope)
    for scale, factors in _spread(raw, 1.0, edges):
        _add(scale, factors, scores, heads, edges)
    if scores.terms.keys() - {"edge"}:
        yield scores
    yield Scores(raw, slope, terms={"edge": [Term(1.0, (PerNode(raw),))]})


def _add(scale: float, factors: tuple[fx.Node, ...], scores: Scores, heads: int, edges: Edges) -> None:
    gathered = edges.gathered(factors[0]) if len(factors) == 1 else None
    if gathered is not None:
        side, tensor = gathered
        scores.add(side, tensor, scale)
        return
    for at, factor in enumerate(factors):
        product = edges.product(factor) if scores.size is None else None
        weights = factors[:at] + factors[at + 1 :]
        if product is None or len(weights) > 1 or (weights and heads != 1):
            continue
        if product.direction is not None:
            if scores.slope != 1:
                continue
            scores.slope = product.slope
            scores.add("direction", PerNode(product.direction, once=True))
        scores.scale, scores.size = scale, product.size
        scores.add("queries", product.queries)
        scores.add("keys", product.keys)
        for weight in weights:
            scores.add("weight", PerNode(weight))
        return
    scores.terms.setdefault("edge", []).append(Term(scale, tuple(map(PerNode, factors))))


def _spread(node: fx.Node, scale: float, edges: Edges) -> list[Spread]:
    """Returns the terms of the sum that a node is. Expands products of sums if they contain queries and keys."""
    node = same(node)
    summands = apply(_SUMS, node, node) or []
    if summands and all(same_shape(each, node) and same_dtype(each, node) for _, each in summands):
        return [term for number, each in summands for term in _spread(each, scale * number, edges)]
    factors = match(_X * _Y, node)
    if factors is None or not alike(node):
        return [(scale, (node,))]
    pairs = [(a, b) for a in _spread(factors["x"], scale, edges) for b in _spread(factors["y"], 1.0, edges)]
    spread = [(one * other, (*some, *more)) for (one, some), (other, more) in pairs]
    known = any(edges.product(each) is not None for _, factors in spread for each in factors)
    return spread if known and len(spread) <= _MOST_TERMS else [(scale, (node,))]


def _is_value(node: fx.Node, heads: int) -> bool:
    """Whether a node has one number for each edge and head: [edges], [edges, heads] or [edges, heads, 1]."""
    shape = node.meta["val"].shape
    own, *others = shape[1:] or [1]
    return len(shape) > 0 and equal(own, heads) and all(equal(size, 1) for size in others)
