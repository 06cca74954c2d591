"""The scores that attention over an edge list is a softmax of, a number an edge and head:

    leaky_relu(%a[source] + %b[target] + %e, slope)                                   graph attention, features of edges
    sum(mul(%q[target], %k[source]), -1) / sqrt(d) + %e                               graph transformer
    sum(mul(leaky_relu(%q[target] + %k[source], slope), %direction), -1) + %e         GATv2 (Brody et al., 2022)

%e is whatever else is added. In a joint graph: what the gradient of the scores is scattered to, term by term.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.nodes import as_long, of_tensors, same, same_dtype, same_shape
from gossamer.backend.messages.message_patterns import Aggregation, Gather, gather_at, rows_of
from gossamer.backend.regions.contractions import is_backward
from gossamer.runtime.torch_internals import statically_known_true
from gossamer.sparsity.edges.edge_attention import MOST_FEATURES

aten = torch.ops.aten


class EdgeIndex:
    """An edge list, to be found again in other nodes; None, the edges themselves, is found in none."""

    def __init__(self, node: fx.Node | None, structure: Structure) -> None:
        self._structure, self._known = structure, None if node is None else self._identity(node, structure)

    def is_(self, node: fx.Node | None) -> bool:
        """Whether this is computed in the same way."""
        return node is not None and self._identity(node, self._structure) == self._known

    @staticmethod
    def _identity(node: fx.Node, structure: Structure) -> tuple[Any, ...]:
        expression = structure.cut(rows_of(node))
        return expression.key, expression.leaves, expression.numbers


@dataclass(frozen=True, eq=False)
class Scores:
    """What they are computed from; None for what is not there.

    raw        what the activation is applied to, if there is one around everything
    slope      of leaky_relu, 1 if there is none
    source     [sources, heads], added at the source of each edge, and `target` [targets, heads] at the target
    keys       [sources, heads, size] and `queries` [targets, heads, size], multiplied, or added if there is a direction; the
               nodes they are gathered from may have heads and size as one dimension
    direction  [..., heads, size], what leaky_relu of `joined`, their sum, is multiplied with
    size       of keys and queries, 0 if there are none
    scale      of the product
    edge       [edges, heads], what else is added
    """

    raw: fx.Node
    slope: float = 1.0
    source: Gather | None = None
    target: Gather | None = None
    keys: Gather | None = None
    queries: Gather | None = None
    direction: fx.Node | None = None
    joined: fx.Node | None = None
    size: int = 0
    scale: float = 1.0
    edge: tuple[fx.Node, ...] | None = None

    @property
    def outer(self) -> float:
        """The slope of a leaky_relu around everything."""
        return 1.0 if self.direction is not None else self.slope


def read_scores(
    node: fx.Node, heads: Any, aggregation: Aggregation, source: EdgeIndex, target: EdgeIndex, structure: Structure
) -> Iterator[Scores]:
    """The ways to read a node as scores, the best first."""
    raw, slope = before_leaky_relu(node)
    if not _is_value(raw, heads) or aggregation.gather is None:
        return
    reading = _Reading(Scores(raw, slope), aggregation, source, target, structure)
    for term in _terms(raw):
        reading.take(term)
    if all(same_shape(term, raw) and same_dtype(term, raw) for term in reading.rest):
        found = reading.scores
        if reading.rest or (found.source, found.target, found.keys) == (None, None, None):
            found = replace(found, edge=tuple(reading.rest))
        yield found
    yield Scores(raw, slope, edge=(raw,))


@dataclass
class _Reading:
    """The terms so far."""

    scores: Scores
    aggregation: Aggregation
    source: EdgeIndex
    target: EdgeIndex
    structure: Structure
    rest: list[fx.Node] = field(default_factory=list)

    def take(self, term: fx.Node) -> None:
        """Adds a term."""
        found = self.scores
        if not same_shape(term, found.raw):
            self.rest.append(term)
            return
        name, gather = self._gather(term)
        if name is not None and getattr(found, name) is None:
            changed: dict[str, Any] = {name: gather}
            self.scores = replace(found, **changed)
            return
        product = self._product(term) if found.keys is None else None
        if product is not None:
            self.scores = replace(found, **product)
        else:
            self.rest.append(term)

    def _gather(self, node: fx.Node) -> tuple[str | None, Gather | None]:
        """Whether rows are gathered by "source" or by "target", and from where."""
        gather = gather_at(node, self.structure)
        if gather is None or not same_dtype(gather.x, self.scores.raw):
            return None, None
        values = self.aggregation.gather
        assert values is not None
        # One edge list, checked once, serves all of them.
        if self.source.is_(gather.index) and as_long(gather.x, values.x):
            return "source", gather
        return (
            ("target", gather) if self.target.is_(gather.index) and as_long(gather.x, self.aggregation.node) else (None, None)
        )

    def _product(self, term: fx.Node) -> dict[str, Any] | None:
        """The parts of Scores that a product of queries and keys makes, directed or not."""
        node, scale = _without_scale(term)
        node = rows_of(node)
        if node.target is not aten.sum.dim_IntList or not same_dtype(node, self.scores.raw):
            return None
        product = same(node.args[0])
        last = node.meta["val"].dim()
        if product.target is not aten.mul.Tensor or not of_tensors(product) or product.meta["val"].dim() != last + 1:
            return None
        if [dim % (last + 1) for dim in node.args[1]] != [last]:  # type: ignore[union-attr]
            return None
        factors = [same(a) for a in product.args]
        pair = self._pair(factors)
        size = product.meta["val"].shape[-1]
        if not isinstance(size, int) or size > MOST_FEATURES:
            return None
        if pair is not None and all(same_shape(factor, product) for factor in factors):
            return {**pair, "size": size, "scale": scale}
        if self.scores.slope != 1:
            return None
        for activated, direction in (factors, factors[::-1]):
            joined, slope = before_leaky_relu(activated)
            if joined.target is not aten.add.Tensor or not of_tensors(joined) or joined.kwargs:
                continue
            terms = [same(a) for a in joined.args]
            pair = self._pair(terms)
            fits = _same_trail(direction, product) and all(same_shape(each, product) for each in (*terms, activated))
            fits = fits and same_dtype(direction, product)
            if pair is not None and fits and direction not in self.structure:
                return {**pair, "size": size, "scale": scale, "slope": slope, "direction": direction, "joined": joined}
        return None

    def _pair(self, nodes: Sequence[fx.Node]) -> dict[str, Gather | None] | None:
        by = dict(self._gather(node) for node in nodes)
        return {"keys": by["source"], "queries": by["target"]} if set(by) == {"source", "target"} else None


def before_leaky_relu(node: fx.Node) -> tuple[fx.Node, float]:
    """What leaky_relu is applied to, and its slope; the node itself and 1 if there is none."""
    if node.target is aten.leaky_relu.default:
        return same(node.args[0]), float((*node.args, 0.01)[1])  # type: ignore[arg-type]
    if node.target is aten.where.self:
        condition, positive, negative = (same(a) for a in node.args)
        scaled = negative.target is aten.mul.Tensor and isinstance(negative.args[1], int | float)
        if scaled and same(negative.args[0]) is positive and _is_positive(condition, positive):
            return positive, float(negative.args[1])  # type: ignore[arg-type]
    return node, 1.0


# Gradients


def is_scores_gradient(node: fx.Node, scores: Scores) -> bool:
    """Whether this is the gradient of `raw`, behind the derivative of the activation around everything."""
    return _before_slope(node, scores.raw, scores.slope) is not None


def gradients_of(
    scores: Scores, gradient: fx.Node, backward: Sequence[Aggregation], source: EdgeIndex, target: EdgeIndex
) -> dict[str, fx.Node]:
    """The nodes that are gradients of terms, by the name of the term, given the gradient of `raw`."""
    found: dict[str, fx.Node] = {}
    for each in backward:
        to = "source" if source.is_(each.target) else "target" if target.is_(each.target) else None
        if to is None:
            continue
        name = to
        if rows_of(each.message) is gradient and each.gather is None:
            pass
        elif _is_of_product(each, to, scores, gradient, source, target):
            name = "keys" if to == "source" else "queries"
        else:
            continue
        if getattr(scores, name) is not None:
            found.setdefault(name, each.node)
    if scores.joined is not None:
        for node in scores.raw.graph.nodes:
            if is_backward(node) and _is_of_direction(node, scores, gradient):
                found.setdefault("direction", node)
    return found


def _is_of_product(each: Aggregation, to: str, scores: Scores, gradient: fx.Node, source: EdgeIndex, target: EdgeIndex) -> bool:
    """Whether this is the gradient of keys (to the sources), or queries."""
    if scores.keys is None or scores.queries is None:
        return False
    if scores.joined is not None:
        if each.gather is not None:
            return False
        of_joined = _before_slope(rows_of(each.message), scores.joined, scores.slope)
        return of_joined is not None and _times(of_joined, scores.direction, scores, gradient)
    other, index = (scores.queries, target) if to == "source" else (scores.keys, source)
    if each.gather is None or each.gather.x is not other.x or not index.is_(each.gather.index) or len(each.factors) != 1:
        return False
    return not each.factors[0].inverse and _is_scaled(each.factors[0].node, scores, gradient)


def _is_of_direction(node: fx.Node, scores: Scores, gradient: fx.Node) -> bool:
    """Whether this is the gradient of the direction: a sum over the edges."""
    if node.target is not aten.sum.dim_IntList or [*node.args[1]] != [0] or scores.direction is None:  # type: ignore[misc]
        return False
    product = same(node.args[0])
    if product.target is not aten.mul.Tensor or not of_tensors(product):
        return False
    return any(
        before_leaky_relu(same(a)) == (scores.joined, scores.slope) and _times(product, same(a), scores, gradient)
        for a in product.args
    )


def _times(product: fx.Node, factor: fx.Node | None, scores: Scores, gradient: fx.Node) -> bool:
    """Whether this is the scaled gradient of the scores times a factor."""
    if product.target is not aten.mul.Tensor or not of_tensors(product):
        return False
    nodes = [same(a) for a in product.args]
    others = [other for other, node in zip(nodes[::-1], nodes, strict=True) if node is factor]
    return len(others) == 1 and _is_scaled(others[0], scores, gradient)


def _is_scaled(node: fx.Node, scores: Scores, gradient: fx.Node) -> bool:
    node = same(node)
    while node.target in _KEPT and as_long(node.args[0], node):
        node = same(node.args[0])
    inner, scale = _without_scale(node)
    return rows_of(inner) is gradient and abs(scale - scores.scale) <= 1e-9 * abs(scores.scale)


_KEPT = (aten.expand.default, aten.unsqueeze.default, aten.view.default, aten.reshape.default)


def _before_slope(node: fx.Node, raw: fx.Node, slope: float) -> fx.Node | None:
    """The gradient of leaky_relu(raw) of which this is that of raw; the node itself if the slope is 1."""
    if slope == 1:
        return node
    if node.target is aten.leaky_relu_backward.default:
        return same(node.args[0]) if same(node.args[1]) is raw and node.args[2] == slope else None
    if node.target is aten.where.self:
        condition, positive, negative = (same(a) for a in node.args)
        scaled = negative.target is aten.mul.Tensor and same(negative.args[0]) is positive and negative.args[1] == slope
        return positive if scaled and positive is not raw and _is_positive(condition, raw) else None
    return None


def _is_positive(condition: fx.Node, node: fx.Node) -> bool:
    return bool(condition.target is aten.gt.Scalar and condition.args[1] == 0 and same(condition.args[0]) is node)


def _without_scale(node: fx.Node) -> tuple[fx.Node, float]:
    """What a node multiplies with a number, and the number."""
    node, scale = same(node), 1.0
    while node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], int | float):
        number = float(node.args[1])
        scale = scale * number if node.target is aten.mul.Tensor else scale / number
        node = same(node.args[0])
    return node, scale


def _terms(node: fx.Node) -> list[fx.Node]:
    if node.target is aten.add.Tensor and of_tensors(node) and not node.kwargs:
        return [term for a in node.args for term in _terms(same(a))]
    return [node]


def _is_value(node: fx.Node, heads: Any) -> bool:
    """Whether it has a number an edge and head."""
    shape = node.meta["val"].shape
    own = 1 if len(shape) == 1 else shape[1] if len(shape) == 2 else None
    return own is not None and bool(statically_known_true(own == heads))


def _same_trail(direction: fx.Node, product: fx.Node) -> bool:
    """Whether a direction is the same for all edges."""
    own, whole = direction.meta["val"].shape, product.meta["val"].shape
    if len(own) == len(whole):
        own = own[1:] if own[0] == 1 else ()
    return len(own) == len(whole) - 1 and all(statically_known_true(p == q) for p, q in zip(own, whole[1:], strict=True))
