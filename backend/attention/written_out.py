"""Recognises attention that a graph writes out as products and softmax, before and after Inductor's decompositions.

    softmax(q @ k.mT * 0.125 + mask) @ v    →    q, k, v, the scale 0.125, the term mask, and the gradients

It starts at the second product. `_SOFTMAXES` has the ways to write the weights. From the scores, it walks back to the first
product, one rule of `_STEPS` at a time. For a new spelling, add a rule. Gradients need no rules: autograd's sequence numbers
find them (`graph/backward_part.py`). Values are [batch, heads, queries, keys] or [batch x heads, queries, keys].
written_attention.py calls this.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import fx

from gossamer.backend.attention.folded_heads import operand, plain
from gossamer.backend.graph.backward_part import BackwardPart, JointGraph
from gossamer.backend.graph.dropout import Dropout, dropout_at
from gossamer.backend.graph.nodes import arguments, between, only_user, same
from gossamer.backend.graph.patterns import (
    LAST,
    Hole,
    Named,
    Number,
    Rule,
    any_of,
    apply,
    converted,
    equals,
    exp,
    largest,
    log,
    log_softmax,
    log_sum_exp,
    masked_fill,
    match,
    native_dropout,
    one_of,
    part,
    safe_softmax,
    softmax,
    tanh,
    total,
    where,
)  # fmt: skip
from gossamer.backend.graph.refused import Refused

aten = torch.ops.aten


@dataclass(frozen=True)
class Term:
    """A term that is added to scores of `dims` dimensions: value * factor. If `hidden` is not None, `value` is bool, and the
    term is `factor` where value == hidden, else 0."""

    value: fx.Node
    dims: int
    factor: float = 1.0
    hidden: bool | None = None


@dataclass(frozen=True)
class Written:
    """One attention.

    q, k, v     [batch, heads, tokens, size], or [batch x heads, tokens, size]
    turned      whether k is [.., size, keys] instead
    factors     the factors of both products, before views: queries, transposed keys, values
    product     the second product, the weighted values
    stacked     one of q, k, v or the scores that is [batch, heads, ...]; None if none is
    scale, cap  the scores are cap * tanh(scale * <q, k> / cap), or scale * <q, k> without a cap
    terms       the terms that are added to the scores; the one that is added last comes first
    safe        whether queries that see no key get 0, not NaN
    dropout     dropout of the weights
    backward    the gradients; empty without a backward pass
    """

    q: fx.Node
    k: fx.Node
    turned: bool
    v: fx.Node
    factors: tuple[fx.Node, fx.Node, fx.Node]
    product: fx.Node
    stacked: fx.Node | None
    scale: float
    cap: float | None
    terms: tuple[Term, ...]
    safe: bool
    dropout: Dropout | None
    backward: BackwardPart

    @property
    def share(self) -> float:
        """The share of weights that dropout sets to 0."""
        return 0.0 if self.dropout is None else self.dropout.share

    @property
    def trains(self) -> bool:
        """Whether the graph computes gradients of it."""
        return self.backward.upstream is not None

    @property
    def added(self) -> list[Term]:
        """The terms of which the graph computes gradients."""
        return [term for term in self.terms if term.hidden is None and self.backward.gradients[term.value]]


@dataclass(frozen=True)
class _Weights:
    """The operand of softmax. `safe` weights are 0, not NaN, if all keys of a query are hidden. `hidden` is a bool value that
    sets weights to 0 after softmax."""

    scores: fx.Node
    safe: bool = False
    hidden: fx.Node | None = None


@dataclass(frozen=True)
class _Scores:
    """The state of the walk from softmax back to the first product. `at` is the node that it has reached.

    The scores are factor * at + terms, or after * tanh(factor * at) + terms if there is a soft cap.
    """

    at: fx.Node
    factor: float = 1.0
    after: float | None = None
    terms: tuple[Term, ...] = ()

    def scaled(self, number: float, score: fx.Node) -> "_Scores":
        return replace(self, at=score, factor=self.factor * number)

    def capped(self, score: fx.Node) -> "_Scores":
        if self.after is not None:
            raise Refused("its scores have two soft caps")
        return replace(self, at=score, factor=1.0, after=self.factor)

    def added(self, value: fx.Node, score: fx.Node, sign: float = 1.0) -> "_Scores":
        return self._and(Term(_repeated(value), self.at.meta["val"].dim(), sign * self.factor), score)

    def filled(self, condition: fx.Node, score: fx.Node, number: float, hidden: bool) -> "_Scores":
        number = torch.tensor(number, dtype=torch.float64).to(self.at.meta["val"].dtype).item()  # -1e9 is -inf in float16
        if not number * self.factor < -1e4:
            raise Refused("its scores are replaced by others")
        return self._and(Term(_repeated(condition), self.at.meta["val"].dim(), number * self.factor, hidden), score)

    def kept(self, seen: fx.Node, score: fx.Node) -> "_Scores":
        """Reads score * seen of score * seen + (1 - seen) * -10000. The second part was read before, as a term."""
        *terms, last = self.terms or (Term(self.at, 0),)
        found = match((1 - converted(Hole("seen"))) * Number("number"), last.value, seen=seen)
        if found is None or self.after is not None:
            raise Refused("its scores are multiplied with a tensor")
        before = replace(self, factor=last.factor, terms=tuple(terms))
        return replace(before.filled(seen, score, found["number"], hidden=False), factor=self.factor)

    def _and(self, term: Term, score: fx.Node) -> "_Scores":
        if self.after is not None:
            raise Refused("its scores are masked before its soft cap")
        return replace(self, at=score, terms=(*self.terms, term))


def _refuse(reason: str) -> Any:
    def means(*_: Any, **__: Any) -> None:
        raise Refused(reason)

    return means


def _is_node(of: Any) -> bool:
    return isinstance(of, fx.Node)


def _is_bool(of: Any) -> bool:
    return isinstance(of, fx.Node) and bool(of.meta["val"].dtype == torch.bool)


x, score, weights, value = Hole("scores"), Hole("score", _is_node), Hole("weights", _is_node), Hole("value", _is_node)
seen, hidden, number = Hole("seen", _is_bool), Hole("hidden", _is_bool), Number("number")

_SHIFTED = Named("shifted", x - largest(x, LAST))
_POWER = Named("power", exp(_SHIFTED))

_SOFTMAXES = [
    Rule(softmax(x, LAST), lambda scores: _Weights(scores)),
    Rule(safe_softmax(x, LAST), lambda scores: _Weights(scores, safe=True)),
    Rule(_POWER / total(_POWER, LAST), lambda scores, **_: _Weights(scores)),
    Rule(exp(log_softmax(x, LAST)), lambda scores: _Weights(scores)),
    Rule(exp(_SHIFTED - log(total(_POWER, LAST))), lambda scores, **_: _Weights(scores)),
    Rule(exp(x - log_sum_exp(x, LAST)), lambda scores, **_: _Weights(scores)),
    Rule(where(~any_of(~equals(x, -inf), LAST), 0, weights), lambda weights, scores: _safe(weights, scores)),
    Rule(masked_fill(weights, hidden, 0), lambda weights, hidden: _zeroed(weights, hidden)),
    Rule(where(hidden, 0, weights), lambda weights, hidden: _zeroed(weights, hidden)),
]
"""The spellings of the weights. The third from the end is torch's decomposition of the safe softmax."""

_STEPS = [
    Rule(score * number, _Scores.scaled),
    Rule(score / number, lambda to, score, number: to.scaled(1 / number, score) if number else None),
    Rule(tanh(score), _Scores.capped),
    Rule(score * converted(seen), _Scores.kept),
    Rule(one_of(score + number, score - number), _refuse("a number is added to its scores")),
    Rule(score + value, _Scores.added),
    Rule(score - value, lambda to, score, value: to.added(value, score, -1.0)),
    Rule(value - score, _refuse("its scores are subtracted")),
    Rule(where(seen, score, number), lambda to, seen, score, number: to.filled(seen, score, number, False)),
    Rule(where(hidden, number, score), lambda to, hidden, score, number: to.filled(hidden, score, number, True)),
    Rule(masked_fill(score, hidden, number), lambda to, hidden, score, number: to.filled(hidden, score, number, True)),
    Rule(one_of(where(seen, score, value), where(seen, value, score)), _refuse("its scores are replaced by others")),
    Rule(one_of(score * value, score / value), _refuse("its scores are multiplied with a tensor")),
]
"""The operations on scores, with their meaning."""

_DROPPED = part(native_dropout(weights, Hole("share")), 0)

_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
_ON_SCORES = {
    aten.mul.Tensor, aten.div.Tensor, aten.tanh.default, aten.add.Tensor, aten.sub.Tensor, aten.where.self,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor,
}  # fmt: skip
"""The operations that occur in `_STEPS`."""


def written_attention(product: fx.Node, joint: Callable[[], JointGraph]) -> Written | None:
    """Returns the attention whose second product is `product`; None if it is another product. Raises Refused for attention that
    no operation computes. `joint` is called to find gradients."""
    weights = plain(product.args[0])
    dropout, dropped = dropout_at(weights), match(_DROPPED, weights)
    if dropped is not None:
        weights = plain(dropped["weights"])
    elif dropout is not None:
        weights = plain(dropout.of)
    found: _Weights | None = apply(_SOFTMAXES, weights)
    if found is None or plain(found.scores).meta["val"].dim() not in (3, 4) or not _products_behind(found.scores):
        return None
    if (dropout is None and dropped is not None) or (dropout is not None and not 0 < dropout.share < 1):
        raise Refused("it has dropout of a share that is not fixed, or of everything")
    scored, scale, cap, terms = _read(found)
    factors: Any = (*scored.args[-2:], product.args[1])
    (q, q_turned), (k, k_turned), (v, v_turned) = (operand(each) for each in factors)
    q, v = factors[0] if q_turned else q, factors[2] if v_turned else v
    way = _on_the_way(found.scores, scored)
    if not {term.value for term in terms}.isdisjoint(way):
        raise Refused("its mask is computed from its scores")
    shapes = [n for n in (q, k, v, *way) if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].dim() == 4]
    if len({term.value for term in terms if term.hidden is None}) < sum(term.hidden is None for term in terms):
        raise Refused("the same is added to its scores twice")
    inputs = list(dict.fromkeys([*factors, *(term.value for term in terms)]))
    backward = joint().part(between(inputs, product), inputs, product)
    return Written(
        q, k, not k_turned, v, factors, product, shapes[0] if shapes else None, scale, cap, terms, found.safe, dropout, backward
    )  # fmt: skip


def _read(weights: _Weights) -> tuple[fx.Node, float, float | None, tuple[Term, ...]]:
    """Returns the first product, the scale, the soft cap, and the terms that are added to scores."""
    to = _Scores(plain(weights.scores))
    while to.at.target not in _PRODUCTS:
        ahead = [n for n in to.at.all_input_nodes if _products_behind(n)]
        if len(ahead) != 1:
            raise Refused("its scores are the sum of several products")
        step: _Scores | None = apply(_STEPS, to.at, to, score=ahead[0])
        if step is None:
            raise Refused(f"its scores go through {to.at.target}")
        to = replace(step, at=plain(step.at))
    if to.at.target is aten.baddbmm.default:
        given: Any = to.at.kwargs
        alpha, beta = (float(given.get(name, 1)) for name in ("alpha", "beta"))
        to = replace(to.added(arguments(to.at)[0], to.at, beta) if beta else to, factor=to.factor * alpha)
    cap = to.after
    if cap is not None and not abs(cap * to.factor) > 0:
        raise Refused("its soft cap is 0")
    terms = to.terms if weights.hidden is None else _hidden_for_good(to.terms, weights.hidden)
    return to.at, to.factor if cap is None else to.factor * cap, cap, terms  # tanh(factor * x) is tanh(scale * x / cap)


def _hidden_for_good(terms: tuple[Term, ...], hidden: fx.Node) -> tuple[Term, ...]:
    """Returns the terms with minus infinity where weights are set to 0 after softmax. Raises Refused if no term hides there."""
    if not any(term.hidden and term.value is _repeated(hidden) for term in terms):
        raise Refused("its weights are replaced by others")
    return tuple(replace(t, factor=-inf) if t.hidden and t.value is _repeated(hidden) else t for t in terms)


def _products_behind(scores: fx.Node, most: int = 24) -> list[fx.Node]:
    """Returns the products that scores are computed from by operations of `_ON_SCORES`. Looks at 23 nodes at most."""
    found, pending = list[fx.Node](), [scores]
    while pending and (most := most - 1):
        node = plain(pending.pop())
        if node.target in _PRODUCTS:
            found.append(node)
        elif node.target in _ON_SCORES:
            pending += [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].dim() > 2]
    return found


def _on_the_way(scores: fx.Node, scored: fx.Node) -> list[fx.Node]:
    return [scored, *between([scored], scores)] if scores is not scored else [scored]


def _repeated(node: fx.Node) -> fx.Node:
    """Returns the value before copies and before expands to the same number of dimensions that have no other user."""
    while True:
        node = same(node)
        source: Any = node.args[0] if node.target is aten.expand.default and only_user(node) is not None else None
        if source is None or source.meta["val"].dim() != node.meta["val"].dim():
            return node
        node = source


def _zeroed(weights: fx.Node, hidden: fx.Node) -> _Weights | None:
    found: _Weights | None = apply(_SOFTMAXES, weights)
    return None if found is None else replace(found, safe=True, hidden=hidden)


def _safe(weights: fx.Node, scores: fx.Node) -> _Weights | None:
    found: _Weights | None = apply(_SOFTMAXES, weights)
    return None if found is None or same(found.scores) is not same(scores) else replace(found, safe=True)
