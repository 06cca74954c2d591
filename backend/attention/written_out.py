"""Attention written out in a graph, as it stands before and after Inductor's decompositions.

    %s = mul(bmm(%q, permute(%k)), 0.125)              the scores; then any of, in any order that a mask ends:
    %c = mul(tanh(div(%s, 50)), 50)                    a soft cap
    %m = add(%c, %mask), where(%seen, %c, -1e9)        what is added, and what is hidden
    %p = softmax(%m)                                   one operation, or exp(m - amax(m)) / sum; or 0 where all keys are hidden
    %d = dropout(%p)
    %y = bmm(%d, %v)

All of it is [batch, heads, queries, keys], or [batch x heads, queries, keys].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.attention.folded_heads import TURNS, operand, plain, swaps, users_of
from gossamer.backend.attention.score_function import number_of
from gossamer.backend.attention.written_gradients import Gradients, gradients_of
from gossamer.backend.graph.dropout import Dropout, dropout_at
from gossamer.backend.graph.nodes import same
from gossamer.backend.graph.refused import Refused

aten = torch.ops.aten


@dataclass(frozen=True)
class Term:
    """Something added to the scores of so many dimensions: a value times a number, or that number where the value is
    `hidden`."""

    value: fx.Node
    dims: int
    factor: float = 1.0
    hidden: bool | None = None


@dataclass(frozen=True)
class Written:
    """One attention.

    q, k, v    [batch, heads, tokens, size], or without the first; the keys may be turned, [.., size, keys]
    product    the node of the weighted values
    scale, cap  the scores are cap * tanh(scale * <q, k> / cap), or scale * <q, k> where there is no cap
    terms      what is added to them
    safe       whether queries that see no key get 0, not NaN
    dropout    of the weights
    """

    q: fx.Node
    k: fx.Node
    turned: bool
    v: fx.Node
    product: fx.Node
    scale: float
    cap: float | None
    terms: tuple[Term, ...]
    gradients: Gradients | None
    safe: bool
    dropout: Dropout | None

    @property
    def share(self) -> float:
        """Of the weights that dropout sets to 0."""
        return 0.0 if self.dropout is None else self.dropout.share


def softmax_before(node: fx.Node) -> fx.Node | None:
    """What a node is the softmax of, over its last dimension."""
    if node.target is aten.where.self:
        inner: Any = node.args[2]
        before = softmax_before(inner) if isinstance(inner, fx.Node) and inner.target is not aten.where.self else None
        return before if before is not None and _is_safe(node, before) else None
    if node.target in (aten._softmax.default, aten._safe_softmax.default):
        source: Any = node.args[0]
        return source if node.args[1] in (-1, source.meta["val"].dim() - 1) else None
    if node.target is not aten.div.Tensor or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    power, total = node.args
    if power.target is not aten.exp.default or not _reduces(total, aten.sum.dim_IntList, power):  # type: ignore[union-attr]
        return None
    (shifted,) = power.args  # type: ignore[union-attr]
    if shifted.target is not aten.sub.Tensor:  # type: ignore[union-attr]
        return None
    source, top = shifted.args  # type: ignore[union-attr]
    return source if isinstance(top, fx.Node) and _reduces(top, aten.amax.default, source) else None


def _is_safe(node: fx.Node, source: fx.Node) -> bool:
    """where(not any(not (source == -inf)), 0, ...), which is what torch takes the safe softmax apart into."""
    hidden, zero = (same(a) for a in node.args[:2])
    if hidden.target is not aten.logical_not.default or number_of(zero) != 0:
        return False
    some: Any = hidden.args[0]
    if some.target is not aten.any.dim or some.args[1] not in (-1, source.meta["val"].dim() - 1):
        return False
    shown = same(some.args[0])
    equal = same(shown.args[0]) if shown.target is aten.logical_not.default else None
    return equal is not None and equal.target is aten.eq.Scalar and equal.args == (source, -torch.inf)


def _reduces(node: Any, target: Any, source: Any) -> bool:
    last = ([-1], [source.meta["val"].dim() - 1])
    return node.target is target and node.args[0] is source and list(node.args[1]) in last and node.args[2:] == (True,)


def written_attention(weights: fx.Node) -> Written | None:
    """The attention of which a softmax has the weights; None if it is another softmax. Raises Refused for what there is no
    operation for."""
    source = softmax_before(weights)
    scores = plain(source) if source is not None else None
    if scores is None or scores.meta["val"].dim() not in (3, 4) or not (products := _products_behind(scores)):
        return None
    uses = users_of(weights)
    dropped = next((found for user, _, _ in uses if (found := _dropout(user, weights)) is not None), None)
    if dropped is not None:
        result, dropout = dropped
        uses = [use for use in uses if use[0] is not dropout.drawn and result not in use[0].users] + users_of(result)
    forward = [user for user, turned, number in uses if user.target is aten.bmm.default and number == 0 and not turned]
    if len(forward) != 1:
        if any(user.target is aten.native_dropout.default for user, _, _ in uses):
            raise Refused("it has dropout of a share that is not fixed, or of everything")
        return None
    (product,) = forward
    if len(products) != 1:
        raise Refused("its scores are the sum of several products")
    scale, cap, terms, scored = _scores(scores)
    factors = scored.args[-2:]
    q, k, v = operand(factors[0]), operand(factors[1]), operand(product.args[1])
    others = [use for use in uses if use[0] is not product]
    gradients = gradients_of(weights, product, scored, others, dropped[1] if dropped else None) if others else None
    turned = not (k.target in TURNS and swaps(k))
    k = k if turned else operand(k.args[0])
    if len({x.meta["val"].dim() for x in (q, k, v)}) != 1:
        raise Refused("its products are of different numbers of dimensions")
    safe = weights.target in (aten.where.self, aten._safe_softmax.default)
    return Written(q, k, turned, v, product, scale, cap, terms, gradients, safe, dropped[1] if dropped else None)


def _products_behind(scores: fx.Node, most: int = 24) -> list[fx.Node]:
    """The products that scores are made of, by operations on each of them."""
    found, pending = [], [scores]
    while pending and (most := most - 1):
        node = plain(pending.pop())
        if node.target in (aten.bmm.default, aten.baddbmm.default):
            found.append(node)
        elif node.target in (aten.mul.Tensor, aten.div.Tensor, aten.tanh.default, *_ADDS, *_CHOICES):
            pending += [n for n in node.all_input_nodes if n.meta["val"].dim() > 2]
    return found


_ADDS = {aten.add.Tensor, aten.sub.Tensor}
_CHOICES = {aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor}


def _dropout(user: fx.Node, weights: fx.Node) -> tuple[fx.Node, Dropout] | None:
    """What a user of weights makes of them if that is dropout, and which."""
    for result in user.users:
        found = dropout_at(result) if isinstance(result.meta.get("val"), torch.Tensor) else None
        if found is not None and same(found.of) is same(weights) and 0 < found.share < 1:
            return result, found
    return None


def _scores(node: fx.Node) -> tuple[float, float | None, tuple[Term, ...], fx.Node]:
    """Scale, cap, what is added, and the product."""
    factor, after, terms, cap = 1.0, 1.0, list[Term](), None
    capped = False
    while True:
        node = plain(node)
        if node.target in (aten.mul.Tensor, aten.div.Tensor):
            at, number = _scaled(node)
            factor *= number
        elif node.target is aten.tanh.default and not capped:
            capped, after, factor, at = True, factor, 1.0, node.args[0]
        elif node.target in _ADDS and not capped:
            at, other, sign = _sides(node)
            terms.append(Term(other, node.meta["val"].dim(), sign * factor))
        elif node.target in _CHOICES and not capped:
            at, term = _chosen(node, factor)
            terms.append(term)
        elif node.target is aten.bmm.default or (node.target is aten.baddbmm.default and not capped):
            break
        else:
            raise Refused(f"its scores go through {node.target}")
        node = at
    if capped:
        cap = after
        if not abs(cap * factor) > 0:
            raise Refused("its soft cap is 0")
        factor *= cap  # tanh(factor * x) is tanh(scale * x / cap)
    if node.target is aten.baddbmm.default:
        terms.append(Term(node.args[0], 3, factor * node.kwargs.get("beta", 1)))  # type: ignore[arg-type, operator]
        factor *= node.kwargs.get("alpha", 1)  # type: ignore[assignment, operator]
    return factor, cap, tuple(terms), node


def _scaled(node: fx.Node) -> tuple[Any, float]:
    at, number = node.args
    if node.target is aten.mul.Tensor and not isinstance(number, int | float):
        at, number = number, at
    if not isinstance(number, int | float) or not isinstance(at, fx.Node):
        raise Refused("its scores are multiplied with a tensor")
    return at, float(number) if node.target is aten.mul.Tensor else 1 / number


def _sides(node: fx.Node) -> tuple[fx.Node, fx.Node, float]:
    """The scores, what is added to them, and its sign."""
    a, b = node.args
    if node.kwargs.get("alpha", 1) != 1 or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        raise Refused("a number is added to its scores")
    if _products_behind(a):
        return a, b, -1.0 if node.target is aten.sub.Tensor else 1.0
    if node.target is aten.sub.Tensor:
        raise Refused("its scores are subtracted")
    return b, a, 1.0


def _chosen(node: fx.Node, factor: float) -> tuple[fx.Node, Term]:
    """The scores, and what hides some of them."""
    if node.target is aten.where.self:
        condition, a, b = node.args
        shown = bool(_products_behind(a))  # type: ignore[arg-type]
        at, value = (a, b) if shown else (b, a)
    else:
        (at, condition, value), shown = node.args, False
    number = number_of(value)
    if number is not None:  # -1e9 is minus infinity in float16
        number = torch.tensor(number, dtype=torch.float64).to(node.meta["val"].dtype).item()
    if number is None or not number * factor < -1e4:
        raise Refused("its scores are replaced by others")
    return at, Term(condition, node.meta["val"].dim(), number * factor, not shown)  # type: ignore[arg-type, return-value]
