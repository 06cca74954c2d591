"""What is a softmax over edges computed from: sums of products of pattern-shaped values, read from a graph's nodes.

    leaky_relu(scale * w * sample(q, k) + t_i + s_j + b, slope)

`read` finds the parts, forward; `Trace` follows a gradient through the same parts, backward.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.einsum_calls import Call, Given, Rows, arguments, call_at, plain, users
from gossamer.runtime.torch_internals import statically_known_true

aten, ours = torch.ops.aten, torch.ops.gossamer


@dataclass(frozen=True, eq=False)
class Term:
    """A product of a number and nodes."""

    scale: float
    factors: tuple[fx.Node, ...]

    def times(self, scale: float = 1.0, *factors: fx.Node) -> "Term":
        """The product with more."""
        return Term(self.scale * scale, (*self.factors, *factors))

    def equals(self, other: "Term") -> bool:
        """Whether both are the same product."""
        return self.scale == other.scale and Counter(self.factors) == Counter(other.factors)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the entries of a pattern.

    slope    of the leaky_relu around everything, 1 if there is none; `raw` is what it is applied to
    product  the sample of two matrices, if there is one, and what it is multiplied by
    nodes    sums of vectors by row ("target") and by column ("source"), each with a factor
    others   the terms besides
    """

    raw: fx.Node
    slope: float
    product: Call | None
    factor: Term
    nodes: dict[str, list[tuple[float, Given]]]
    others: list[Term]


def read(node: fx.Node, rows: Rows) -> Scores | None:
    """The scores that a node holds, one for each entry of the pattern; None if they are no such sum."""
    raw, slope = _before_leaky_relu(plain(node))
    product, factor = None, Term(1.0, ())
    nodes: dict[str, list[tuple[float, Given]]] = {"target": [], "source": []}
    others = []
    for term in _terms(raw, 1.0):
        calls = [(f, call) for f in term.factors if (call := call_at(f, ours.sample.default)) and _of(call, rows)]
        dots = [(f, call) for f, call in calls if _is_product(call)]
        if dots and product is None:
            sampled, product = dots[0]
            left = list(term.factors)
            left.remove(sampled)
            factor = Term(term.scale, tuple(left))
        elif len(term.factors) == 1 and calls and (side := _side(calls[0][1])):
            nodes[side].append((term.scale, calls[0][1].operands[1]))
        else:
            others.append(term)
    vectors = [vector.values for parts in nodes.values() for _, vector in parts]
    one = all(_is_like(each, raw) for term in (factor, *others) for each in term.factors)
    one = one and all(vector.meta["val"].dtype == raw.meta["val"].dtype for vector in vectors)
    return Scores(raw, slope, product, factor, nodes, others) if one and len(factor.factors) <= 1 else None


def _is_like(node: fx.Node, raw: fx.Node) -> bool:
    """Whether a factor has a number for each entry, of the type of the scores."""
    value, scores = node.meta["val"], raw.meta["val"]
    return value.dim() == 1 and value.dtype == scores.dtype and bool(statically_known_true(value.shape[0] == scores.shape[0]))


def _of(call: Call, rows: Rows) -> bool:
    own = call.operands[0].rows
    return own is not None and own.pattern == rows.pattern


def _is_product(call: Call) -> bool:
    """Whether this is the product of a row of one matrix and a row of another."""
    rows = call.operands[0].rows
    if rows is None or len(call.dense) != 2 or any(len(each.letters) != 2 for each in call.dense):
        return False
    left, right = (set(each.letters) for each in call.dense)
    shared = left & right
    return len(shared) == 1 and {*left, *right} - shared == {rows.row, rows.column}


def _side(call: Call) -> str | None:
    """ "target" or "source" for one vector, by row or by column."""
    rows = call.operands[0].rows
    if rows is None or len(call.dense) != 1 or len(call.dense[0].letters) != 1:
        return None
    return "target" if call.dense[0].letters == rows.row else "source"


def _before_leaky_relu(node: fx.Node) -> tuple[fx.Node, float]:
    if node.target is aten.leaky_relu.default:
        return plain(arguments(node)[0]), float(arguments(node)[1]) if len(arguments(node)) > 1 else 0.01
    if node.target is aten.relu.default:
        return plain(arguments(node)[0]), 0.0
    if node.target is aten.where.self:
        condition, kept, scaled = arguments(node)
        slope = _number_times(scaled, plain(kept))
        if slope is not None and _asks_positive(condition, plain(kept)):
            return plain(kept), slope
    return node, 1.0


def _asks_positive(condition: Any, raw: fx.Node) -> bool:
    return condition.target is aten.gt.Scalar and plain(arguments(condition)[0]) is raw and arguments(condition)[1] == 0


def _number_times(node: fx.Node, of: fx.Node) -> float | None:
    """The number that the node multiplies another with."""
    if plain(node).target is aten.mul.Tensor:
        left, right = arguments(plain(node))
        if plain(left) is of and isinstance(right, int | float):
            return float(right)
    return None


def _terms(node: fx.Node, scale: float) -> Iterator[Term]:
    """The sum that a node holds, its products spread out."""
    node = plain(node)
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and all(isinstance(arg, fx.Node) for arg in arguments(node)):
        left, right = arguments(node)
        sign = -1.0 if node.target is aten.sub.Tensor else 1.0
        yield from _terms(left, scale)
        alpha: Any = node.kwargs.get("alpha", 1)
        yield from _terms(right, scale * sign * float(alpha))
        return
    step = _step(node)
    if step is None:
        yield Term(scale, (node,))
        return
    inner, number, factor = step
    if factor is None:
        yield from _terms(inner, scale * number)
        return
    left, right = list(_terms(inner, scale)), list(_terms(factor, 1.0))
    if len(left) * len(right) > 8:
        yield Term(scale, (node,))
        return
    for a in left:
        yield from (a.times(b.scale, *b.factors) for b in right)


def _step(node: fx.Node) -> tuple[fx.Node, float, fx.Node | None] | None:
    """What a node multiplies: a node, and a number or another node."""
    if node.target is aten.neg.default:
        return plain(arguments(node)[0]), -1.0, None
    if node.target is aten.mul.Tensor:
        left, right = arguments(node)
        if isinstance(right, fx.Node) and isinstance(left, fx.Node):
            return plain(left), 1.0, plain(right)
        return plain(left), float(right), None
    if node.target is aten.div.Tensor and not isinstance(arguments(node)[1], fx.Node):
        return plain(arguments(node)[0]), 1 / float(arguments(node)[1]), None
    return None


@dataclass(eq=False)
class Trace:
    """Where the gradient of scores goes to.

    start    the gradient of `raw`, the scores before leaky_relu
    ends     uses of it as the values of a sparse operand of an einsum, with the factor it has there
    weights  products with the sampled matrix product, which are gradients of what multiplies it
    more     whether anything else uses it, so that it has to be there as values of the entries
    """

    start: fx.Node
    ends: list[tuple[Call, Term]] = field(default_factory=list)
    weights: list[tuple[fx.Node, Term]] = field(default_factory=list)
    more: bool = False

    @classmethod
    def of(cls, gradient: fx.Node, scores: Scores) -> "Trace | None":
        """Follows the gradient of softmax's input; None if leaky_relu's is not found."""
        start = gradient if scores.slope == 1 else _through_leaky_relu(gradient, scores)
        if start is None:
            return None
        trace = cls(start)
        trace._follow(start, Term(1.0, ()), scores)
        return trace

    def _follow(self, node: fx.Node, term: Term, scores: Scores) -> None:
        sampled = scores.product.node if scores.product is not None else None
        for user in users(node):
            call = call_at(user, ours.einsum.default)
            if call is not None and len(call.sparse) == 1 and plain(call.sparse[0].values) is plain(node):
                self.ends.append((call, term))
                continue
            step = _step(user)
            if step is None:
                self.more = True
                continue
            inner, number, factor = step
            other = inner if factor is plain(node) else factor
            if other is not None and other is sampled:
                self.weights.append((user, term))
            elif other is None:
                self._follow(user, term.times(number), scores)
            else:
                self._follow(user, term.times(1.0, other), scores)


def _through_leaky_relu(gradient: fx.Node, scores: Scores) -> fx.Node | None:
    """The gradient of what leaky_relu is applied to, for that of its result."""
    after = users(gradient)
    if len(after) == 1 and after[0].target is aten.leaky_relu_backward.default:
        _, raw, slope, is_result = arguments(after[0])
        fits = plain(raw) is scores.raw and slope == scores.slope and not is_result
        return after[0] if fits else None
    for node in after:
        if node.target is aten.where.self and len(after) == 2:
            condition, kept, scaled = arguments(node)
            fits = plain(kept) is plain(gradient) and _asks_positive(condition, scores.raw)
            return node if fits and _number_times(scaled, plain(gradient)) == scores.slope else None
    return None
