"""Attention written out in a graph, as it stands before and after Inductor's decompositions, and its gradients.

    %s = mul(bmm(%q, permute(%k)), 0.125)              the scores; then any of, in any order that a mask ends:
    %c = mul(tanh(div(%s, 50)), 50)                    a soft cap
    %m = add(%c, %mask), where(%seen, %c, -1e9)        what is added, and what is hidden
    %p = softmax(%m)                                   one operation, or exp(m - amax(m)) / sum; or 0 where all keys are hidden
    %d = dropout(%p)
    %y = bmm(%d, %v)

All of it is [batch, heads, queries, keys], or [batch x heads, queries, keys].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.attention.score_function import Refused, number_of
from gossamer.backend.graph.dropout import Dropout, dropout_at
from gossamer.backend.graph.nodes import COPIES, SPREADS, VIEWS, equal_sizes, same, same_shape

aten, prims = torch.ops.aten, torch.ops.prims

_CONVERT = {prims.convert_element_type.default, aten._to_copy.default}
_TURNS = {aten.permute.default, aten.transpose.int}
_GRADIENT = {
    "aten.mul.Tensor", "aten.div.Tensor", "aten.sub.Tensor", "aten.neg.default", "aten.sum.dim_IntList", "prims.fma.default",
    "aten._softmax_backward_data.default", "aten.tanh_backward.default", "aten.where.self", "aten.masked_fill.Scalar",
    "aten.native_dropout_backward.default",
}  # fmt: skip
"""What lies between the gradient of the weights and the products that it ends in; by name, for Inductor registers some of
them when it is imported."""


@dataclass(frozen=True)
class Term:
    """Something added to the scores of so many dimensions: a value times a number, or that number where the value is
    `hidden`."""

    value: fx.Node
    dims: int
    factor: float = 1.0
    hidden: bool | None = None


@dataclass(frozen=True)
class Gradients:
    """The products for the gradients of q, k (turned) and v, the node of the result's gradient, and what those of q and k are
    multiplied with afterwards.

    more    nodes for that of all that softmax is of, if something else is computed from it: of `sums`, which are over axes of
            batches and heads, or it itself
    """

    upstream: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    factor: float
    more: tuple[fx.Node, ...]
    sums: bool


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
    scores = _plain(source) if source is not None else None
    if scores is None or scores.meta["val"].dim() not in (3, 4) or not (products := _products_behind(scores)):
        return None
    uses = _uses(weights)
    dropped = next((found for user, _, _ in uses if (found := _dropout(user, weights)) is not None), None)
    if dropped is not None:
        result, dropout = dropped
        uses = [use for use in uses if use[0] is not dropout.drawn and result not in use[0].users] + _uses(result)
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
    q, k, v = _operand(factors[0]), _operand(factors[1]), _operand(product.args[1])
    others = [use for use in uses if use[0] is not product]
    gradients = _gradients(weights, product, scored, others, dropped[1] if dropped else None) if others else None
    turned = not (k.target in _TURNS and _swaps(k))
    k = k if turned else _operand(k.args[0])
    if len({x.meta["val"].dim() for x in (q, k, v)}) != 1:
        raise Refused("its products are of different numbers of dimensions")
    safe = weights.target in (aten.where.self, aten._safe_softmax.default)
    return Written(q, k, turned, v, product, scale, cap, terms, gradients, safe, dropped[1] if dropped else None)


def _plain(node: Any) -> fx.Node:
    """The node before copies, views that fold or unfold batch and heads, and other types."""
    while node.target in COPIES | _CONVERT or (node.target in SPREADS and (same_shape(node.args[0], node) or _folds(node))):
        node = node.args[0]
    return node


def _folds(node: fx.Node) -> bool:
    """Whether a view has batch and heads in one dimension, or takes that apart."""
    before, after = (n.meta["val"].shape for n in (node.args[0], node))  # type: ignore[union-attr]
    sizes = {len(before), len(after)}
    return node.target in VIEWS and sizes == {3, 4} and equal_sizes(before[-2:], after[-2:])


def _products_behind(scores: fx.Node, most: int = 24) -> list[fx.Node]:
    """The products that scores are made of, by operations on each of them."""
    found, pending = [], [scores]
    while pending and (most := most - 1):
        node = _plain(pending.pop())
        if node.target in (aten.bmm.default, aten.baddbmm.default):
            found.append(node)
        elif node.target in (aten.mul.Tensor, aten.div.Tensor, aten.tanh.default, *_ADDS, *_CHOICES):
            pending += [n for n in node.all_input_nodes if n.meta["val"].dim() > 2]
    return found


_ADDS = {aten.add.Tensor, aten.sub.Tensor}
_CHOICES = {aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor}


def _uses(weights: fx.Node) -> list[tuple[fx.Node, bool, int]]:
    """What takes the weights, whether turned, and as which argument."""
    found, pending, seen = [], [(weights, False)], {weights}
    while pending:
        node, turned = pending.pop()
        for user in node.users:
            swaps = user.target in _TURNS and _swaps(user)
            if user.target in SPREADS | _CONVERT or swaps:
                if user not in seen:
                    seen.add(user)
                    pending.append((user, turned ^ swaps))
            else:
                found.append((user, turned, next((i for i, a in enumerate(user.args) if a is node), -1)))
    return found


def _swaps(node: fx.Node) -> bool:
    """Whether it swaps the last two dimensions, and no others."""
    dims = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    order = list(range(dims))
    order[-2:] = order[:-3:-1]
    if node.target is aten.permute.default:
        return [a % dims for a in node.args[1]] == order  # type: ignore[union-attr]
    return {a % dims for a in node.args[1:]} == {dims - 1, dims - 2}


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
        node = _plain(node)
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


def _operand(node: Any) -> fx.Node:
    """The value of four dimensions that one of three was folded from, or that one."""
    node = same(node)
    if node.target in VIEWS and _folds(node) and node.args[0].meta["val"].dim() == 4:
        return same(node.args[0])
    return node


def _gradients(
    weights: fx.Node,
    product: fx.Node,
    scored: fx.Node,
    others: list[tuple[fx.Node, bool, int]],
    dropout: Dropout | None,
) -> Gradients:
    """Those that autograd has made. `others` are the uses of the weights, before and after dropout, besides the product."""
    of_v = [user for user, turned, number in others if user.target is aten.bmm.default and turned and number == 0]
    if len(of_v) != 1:
        raise Refused("its weights are used elsewhere")
    upstream: Any = of_v[0].args[1]
    starts = [u for u in upstream.users if u.target is aten.bmm.default and u is not of_v[0] and u.args[0] is upstream]
    if len(starts) != 1 or not _turned(starts[0].args[1], product.args[1]):
        raise Refused("its weights are used elsewhere")
    before, ends, last = _followed(starts[0], lambda node: _of_softmax(node, weights))
    if len(last) != 1 or ends:
        raise Refused("its weights are used elsewhere")
    (scores,) = last
    if dropout is not None and not any(dropout.gradient_before(node) is not None for node in before):
        raise Refused("its dropout has another gradient")
    known = before | last
    if any(user not in known and not _before(user, known) for user, _, _ in others if user is not of_v[0]):
        raise Refused("its weights are used elsewhere")
    after, ends, elsewhere = _followed(scores, lambda node: node.target is aten.sum.dim_IntList)
    q, k = (_operand(a) for a in scored.args[-2:])
    of_q = [e for e in ends if e.args[0] in after and _turned(e.args[1], k)]
    of_k = [e for e in ends if e.args[1] in after and _turned(e.args[0], q)]
    if len(of_q) != 1 or len(of_k) != 1:
        raise Refused("its products have other gradients")
    sums = len(ends) == 2 and all(_sums_of(node, scores) for node in elsewhere)
    more = tuple(elsewhere) if sums else (scores,)
    return Gradients(upstream, of_q[0], of_k[0], of_v[0], scored.kwargs.get("alpha", 1), more, sums)  # type: ignore[arg-type]


def _sums_of(node: fx.Node, scores: fx.Node) -> bool:
    """Whether a node is the sum of scores [batch, heads, queries, keys] over batches, heads or both, which have one place."""
    if node.target is not aten.sum.dim_IntList or len(node.args) != 3 or not node.args[2] or node.kwargs:
        return False
    summed: Any = node.args[0]
    return summed.meta["val"].dim() == 4 and {0, 1}.issuperset(axes_of(node)) and _plain(summed) is _plain(scores)


def axes_of(node: fx.Node) -> list[int]:
    """The axes of four over which a node is a sum."""
    axes: Any = node.args[1]
    return [axis % 4 for axis in axes]


def _followed(start: fx.Node, stops: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], list[fx.Node], set[fx.Node]]:
    """What is computed from a node by operations that gradients of scores go through, products of it, and what else is, or
    where it `stops`."""
    between, pending, ends, last = {start}, [start], list[fx.Node](), set[fx.Node]()
    while pending:
        for user in pending.pop().users:
            if stops(user) or not (user.target in (aten.bmm.default, *SPREADS, *_CONVERT) or str(user.target) in _GRADIENT):
                last.add(user)
            elif user.target is aten.bmm.default:
                ends.append(user)
            elif user not in between:
                between.add(user)
                pending.append(user)
    return between, ends, last


def _of_softmax(node: fx.Node, weights: fx.Node) -> bool:
    """Whether a node is the last one of the gradient of a softmax: p * (g - sum(p * g))."""
    if node.target is aten._softmax_backward_data.default:
        return _is(node.args[1], weights)
    if node.target is aten.sub.Tensor:  # p * g - p * sum
        weighted, rest = node.args
        factors = rest.args if isinstance(rest, fx.Node) and rest.target is aten.mul.Tensor else ()
        total = next((a for a in factors if not _is(a, weights)), None)
    elif str(node.target) == "prims.fma.default":  # -p * sum + p * g
        negative, total, weighted = node.args
        factors = same(negative).args if same(negative).target is aten.neg.default else ()
    else:
        return False
    if not any(_is(a, weights) for a in factors) or not isinstance(total, fx.Node):
        return False
    return total.target is aten.sum.dim_IntList and total.args[0] is weighted


def _is(node: Any, other: fx.Node) -> bool:
    return isinstance(node, fx.Node) and same(node) is same(other)


def _before(user: fx.Node, between: set[fx.Node]) -> bool:
    """Whether all that is made of it is between."""
    return all(after in between or (str(after.target) in _GRADIENT and _before(after, between)) for after in user.users)


def _turned(node: Any, of: Any) -> bool:
    """Whether a node is another one with its last dimensions swapped."""
    node, of = same(node), _operand(of)
    if node.target in _TURNS and _swaps(node) and _operand(node.args[0]) is of:
        return True
    return of.target in _TURNS and _swaps(of) and _operand(node) is same(of.args[0])
