"""The scores that attention over edges is a softmax of, a number for each edge and head, and where their gradient goes.

    leaky_relu(scale * %w * product(%q, %k) + %t[target] + %s[source] + %e, slope)        the product may have a direction

Graph attention networks have %t and %s, graph transformers a product, GATv2 one with a direction; %e is whatever else is added.
Names do not matter, nor does the order of terms and factors, scales in between, or how a product of sums is spread out.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gossamer.backend.edges.leaky_relu import before_its_gradient, before_leaky_relu
from gossamer.backend.edges.spelling import SIDES, Edges, PerNode, Product, Sum, rows_of, unexpanded
from gossamer.backend.graph.nodes import equal, is_backward, of_tensors, same, same_dtype, same_shape

aten = torch.ops.aten

_TIMES, _OVER = (aten.mul.Tensor, aten.mul.Scalar), (aten.div.Tensor, aten.div.Scalar)

_MOST_TERMS = 8


@dataclass(frozen=True, eq=False)
class Term:
    """A product of a number and nodes."""

    scale: float
    factors: tuple[fx.Node, ...]

    def times(self, scale: float, *factors: fx.Node) -> "Term":
        """The product with more."""
        return Term(self.scale * scale, (*self.factors, *factors))

    def over(self, other: "Term") -> float | None:
        """The number that the other product is to be multiplied with to be this one."""
        return self.scale / other.scale if other.scale and Counter(self.factors) == Counter(other.factors) else None


@dataclass(eq=False)
class Scores:
    """What they are computed from.

    raw      what leaky_relu is applied to, if there is one around everything
    slope    of it, 1 if there is none
    product  of queries and keys, if there is one, and what it is multiplied by: a number, and a weight for each edge or nothing
    nodes    what is added for each side of an edge, with factors
    others   the terms besides
    """

    raw: fx.Node
    slope: float
    product: Product | None = None
    factor: Term = field(default_factory=lambda: Term(1.0, ()))
    nodes: dict[str, list[tuple[float, PerNode]]] = field(default_factory=lambda: {side: [] for side in SIDES})
    others: list[Term] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether nothing of the scores is known but that they are there."""
        return self.product is None and not any(self.nodes.values())

    @property
    def stored(self) -> bool:
        """Whether any of them is there as a number for each edge."""
        return self.alone or bool(self.others)


def read(node: fx.Node, heads: int, edges: Edges) -> Iterator[Scores]:
    """The ways to read a node as scores, the best first."""
    raw, slope = before_leaky_relu(node)
    if not _is_value(raw, heads):
        return
    scores = Scores(raw, slope)
    for term in _terms(raw, 1.0, edges):
        _add(term, scores, heads, edges)
    yield scores
    if not scores.alone:
        yield Scores(raw, slope)


def _add(term: Term, scores: Scores, heads: int, edges: Edges) -> None:
    gathered = edges.gathered(term.factors[0]) if len(term.factors) == 1 else None
    if gathered is not None:
        side, tensor = gathered
        scores.nodes[side].append((term.scale, tensor))
        return
    for at, factor in enumerate(term.factors):
        product = edges.product(factor) if scores.product is None else None
        weights = term.factors[:at] + term.factors[at + 1 :]
        if product is None or len(weights) > 1 or (weights and heads != 1):
            continue
        if product.direction is None or scores.slope == 1:
            scores.product, scores.factor = product, Term(term.scale, weights)
            return
    scores.others.append(term)


def _terms(node: fx.Node, scale: float, edges: Edges) -> list[Term]:
    """The sum that a node holds; products with sums are spread out where there are queries and keys in them."""
    node = same(node)
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and _alike(node):
        left, right = node.args
        sign = -1.0 if node.target is aten.sub.Tensor else 1.0
        alpha: Any = node.kwargs.get("alpha", 1)
        return _terms(left, scale, edges) + _terms(right, scale * sign * float(alpha), edges)  # type: ignore[arg-type]
    inner, number, factor = _step(node)
    if factor is None:
        kept = inner is node or not same_dtype(inner, node)
        return [Term(scale, (node,))] if kept else _terms(inner, scale * number, edges)
    if not _alike(node):
        return [Term(scale, (node,))]
    pairs = [(a, b) for a in _terms(inner, scale, edges) for b in _terms(factor, 1.0, edges)]
    spread = [a.times(b.scale, *b.factors) for a, b in pairs]
    known = any(edges.product(each) is not None for term in spread for each in term.factors)
    return spread if known and len(spread) <= _MOST_TERMS else [Term(scale, (node,))]


def _alike(node: fx.Node) -> bool:
    """Whether a node and the two that it is computed from are tensors of one shape and type."""
    return of_tensors(node) and all(same_shape(a, node) and same_dtype(a, node) for a in node.args)


def _step(node: fx.Node) -> tuple[fx.Node, float, fx.Node | None]:
    """What a node multiplies: a node, a number, and another node or nothing; itself if it multiplies nothing."""
    arguments: tuple[Any, ...] = node.args
    if node.target is aten.neg.default:
        return same(arguments[0]), -1.0, None
    if node.target is aten.mul.Tensor and of_tensors(node):
        left, right = map(same, arguments)
        for one, other in ((left, right), (right, left)):
            if _is_ones(one) and same_shape(other, node) and same_dtype(other, node):
                return other, 1.0, None
        return left, 1.0, right
    if node.target in (*_TIMES, *_OVER) and isinstance(arguments[1], int | float) and arguments[1]:
        number = float(arguments[1])
        return same(arguments[0]), number if node.target in _TIMES else 1 / number, None
    return node, 1.0, None


def _is_ones(node: fx.Node) -> bool:
    """Whether these are the values of a pattern that has none of its own."""
    filled = node.target in (aten.full.default, aten.full_like.default) and bool(node.args[1] == 1)
    return filled or node.target in (aten.ones.default, aten.ones_like.default)


def _is_value(node: fx.Node, heads: int) -> bool:
    """Whether it has a number for each edge and head."""
    shape = node.meta["val"].shape
    own = 1 if len(shape) == 1 else shape[1] if len(shape) == 2 else None
    return own is not None and equal(own, heads)


# Gradients


@dataclass(frozen=True)
class Gradient:
    """A node that is a multiple of the gradient of a term."""

    place: PerNode
    multiple: float = 1.0


Gradients = dict[str, list[Gradient]]


def starts(scores: Scores, of_softmax: Sequence[fx.Node]) -> list[fx.Node]:
    """The gradients of `raw`, given those of what the softmax is of."""
    if scores.slope == 1:
        return list(of_softmax)
    backward = (node for node in scores.raw.graph.nodes if is_backward(node))
    return [node for node in backward if before_its_gradient(node, scores.raw, scores.slope) is not None]


def gradients(scores: Scores, start: fx.Node, edges: Edges) -> Gradients:
    """What is computed from the gradient of `raw`, by the name of the term that it is the gradient of."""
    found: Gradients = {}
    trace = _Trace(scores, start)
    for each in edges.backward_sums():
        known = trace.of_sum(each)
        if known is not None:
            name, multiple = known
            found.setdefault(name, []).append(Gradient(each.result, multiple))
    product = scores.product
    for node in start.graph.nodes if product is not None else ():
        known = trace.of_entries(node, product) if product is not None and is_backward(node) else None
        if known is not None:
            name, multiple = known
            found.setdefault(name, []).append(Gradient(PerNode(node), multiple))
    return found


class _Trace:
    """Which multiples of the gradient of scores are gradients of their terms."""

    def __init__(self, scores: Scores, start: fx.Node) -> None:
        self._scores, self._start, self._product = scores, start, scores.product
        self._of_scores = Term(1.0, (start,))
        self._of_product = self._taken_apart(scores.factor.times(1.0, start))

    def of_sum(self, each: Sum) -> tuple[str, float] | None:
        """What a sum over edges is the gradient of."""
        term, product = self._taken_apart(Term(1.0, each.factors)), self._product
        if each.gathered is None and self._scores.nodes[each.side]:
            multiple = term.over(self._of_scores)
            if multiple is not None:
                return each.side, multiple
        if product is None:
            return None
        name, other = ("queries", product.keys) if each.side == "target" else ("keys", product.queries)
        if product.direction is not None:
            multiple = self._of_joined(each, product)
        elif each.gathered is not None and same(each.gathered.tensor) is same(other.tensor):
            multiple = term.over(self._of_product)
        else:
            return None
        return None if multiple is None else (name, multiple)

    def _of_joined(self, each: Sum, product: Product) -> float | None:
        """Which multiple of the gradient of queries plus keys is summed."""
        if each.gathered is not None or len(each.factors) != 1 or product.joined is None or product.direction is None:
            return None
        inner = before_its_gradient(rows_of(each.factors[0]), product.joined, product.slope)
        expected = self._taken_apart(self._of_product.times(1.0, product.direction))
        return None if inner is None else self._taken_apart(Term(1.0, (inner,))).over(expected)

    def of_entries(self, node: fx.Node, product: Product) -> tuple[str, float] | None:
        """Whether a node is the gradient of the weight, or of the direction."""
        if self._scores.factor.factors and node.target is aten.mul.Tensor:
            expected = Term(self._scores.factor.scale, (self._start, rows_of(product.node)))
            multiple = self._taken_apart(Term(1.0, (node,))).over(expected)
            if multiple is not None:
                return "weight", multiple
        if product.direction is None or node.target is not aten.sum.dim_IntList or [*node.args[1]] != [0]:  # type: ignore[misc]
            return None
        term = self._taken_apart(Term(1.0, (same(node.args[0]),)))
        activated = [f for f in term.factors if before_leaky_relu(f) == (product.joined, product.slope)]
        multiple = term.over(self._of_product.times(1.0, *activated)) if len(activated) == 1 else None
        return None if multiple is None else ("direction", multiple)

    def _taken_apart(self, term: Term) -> Term:
        """The factors of all but the gradient itself, behind views that keep rows."""
        found = Term(term.scale, ())
        for factor in term.factors:
            node = unexpanded(factor)
            inner, number, other = (node, 1.0, None) if node is self._start else _step(node)
            if inner is node:
                found = found.times(1.0, node)
            else:
                inside = self._taken_apart(Term(number, (inner,) if other is None else (inner, other)))
                found = found.times(inside.scale, *inside.factors)
        return found
