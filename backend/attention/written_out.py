"""Attention written out in a graph, as it stands before and after Inductor's decompositions, and its gradients.

    %s = mul(bmm(%q, permute(%k)), 0.125)              the scores; then any of, in any order that a mask ends:
    %c = mul(tanh(div(%s, 50)), 50)                    a soft cap
    %m = add(%c, %mask), where(%seen, %c, -1e9)        what is added, and what is hidden
    %p = softmax(%m)                                   one operation, or exp(m - amax(m)) / sum
    %y = bmm(%p, %v)

All of it is [batch, heads, queries, keys], or [batch x heads, queries, keys].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.attention.score_function import Refused, number_of
from gossamer.backend.graph.dropout import dropout_at
from gossamer.backend.graph.nodes import COPIES, SPREADS, VIEWS, equal_sizes, same, same_shape

aten, prims = torch.ops.aten, torch.ops.prims

_CONVERT = {prims.convert_element_type.default, aten._to_copy.default}
_TURNS = {aten.permute.default, aten.transpose.int}
_GRADIENT = {
    "aten.mul.Tensor", "aten.div.Tensor", "aten.sub.Tensor", "aten.neg.default", "aten.sum.dim_IntList", "prims.fma.default",
    "aten._softmax_backward_data.default", "aten.tanh_backward.default", "aten.where.self", "aten.masked_fill.Scalar",
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
    multiplied with afterwards."""

    upstream: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    factor: float


@dataclass(frozen=True)
class Written:
    """One attention.

    q, k, v    [batch, heads, tokens, size], or without the first; the keys may be turned, [.., size, keys]
    product    the node of the weighted values
    scale, cap  the scores are cap * tanh(scale * <q, k> / cap), or scale * <q, k> where there is no cap
    terms      what is added to them
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


def softmax_before(node: fx.Node) -> fx.Node | None:
    """What a node is the softmax of, over its last dimension."""
    if node.target is aten._softmax.default:
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
    forward = [user for user, turned, number in uses if user.target is aten.bmm.default and number == 0 and not turned]
    if len(forward) != 1:
        if any(_dropped(user) for user, _, _ in uses):
            raise Refused("its dropout is drawn in the graph")
        return None
    (product,) = forward
    if len(products) != 1:
        raise Refused("its scores are the sum of several products")
    scale, cap, terms, scored = _scores(scores)
    factors = scored.args[-2:]
    q, k, v = _operand(factors[0]), _operand(factors[1]), _operand(product.args[1])
    others = [use for use in uses if use[0] is not product]
    gradients = _gradients(product, scored, others) if others else None
    turned = not (k.target in _TURNS and _swaps(k))
    k = k if turned else _operand(k.args[0])
    if len({x.meta["val"].dim() for x in (q, k, v)}) != 1:
        raise Refused("its products are of different numbers of dimensions")
    return Written(q, k, turned, v, product, scale, cap, terms, gradients)


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


def _dropped(user: fx.Node) -> bool:
    return user.target is aten.native_dropout.default or any(
        dropout_at(after) is not None for after in (user, *user.users) if isinstance(after.meta.get("val"), torch.Tensor)
    )


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


def _gradients(product: fx.Node, scored: fx.Node, others: list[tuple[fx.Node, bool, int]]) -> Gradients:
    """Those that autograd has made. `others` are the uses of the weights, besides the product."""
    of_v = [user for user, turned, number in others if user.target is aten.bmm.default and turned and number == 0]
    if len(of_v) != 1:
        raise Refused("its weights are used elsewhere")
    upstream: Any = of_v[0].args[1]
    starts = [u for u in upstream.users if u.target is aten.bmm.default and u is not of_v[0] and u.args[0] is upstream]
    if len(starts) != 1 or not _turned(starts[0].args[1], product.args[1]):
        raise Refused("its weights are used elsewhere")
    between, pending, ends = set(starts), list(starts), list[fx.Node]()
    while pending:
        for user in pending.pop().users:
            if user.target is aten.bmm.default:
                ends.append(user)
            elif user.target in SPREADS | _CONVERT or str(user.target) in _GRADIENT:
                if user not in between:
                    between.add(user)
                    pending.append(user)
            else:
                raise Refused("what is added to its scores has a gradient, or its weights are used elsewhere")
    if any(user not in between for user, _, _ in others if user is not of_v[0] and not _before(user, between)):
        raise Refused("its weights are used elsewhere")
    q, k = (_operand(a) for a in scored.args[-2:])
    of_q = [e for e in ends if e.args[0] in between and _turned(e.args[1], k)]
    of_k = [e for e in ends if e.args[1] in between and _turned(e.args[0], q)]
    if len(ends) != 2 or len(of_q) != 1 or len(of_k) != 1:
        raise Refused("what is added to its scores has a gradient, or its weights are used elsewhere")
    return Gradients(upstream, of_q[0], of_k[0], of_v[0], scored.kwargs.get("alpha", 1))  # type: ignore[arg-type]


def _before(user: fx.Node, between: set[fx.Node]) -> bool:
    """Whether all that is made of it is between."""
    return all(after in between or (str(after.target) in _GRADIENT and _before(after, between)) for after in user.users)


def _turned(node: Any, of: Any) -> bool:
    """Whether a node is another one with its last dimensions swapped."""
    node, of = same(node), _operand(of)
    if node.target in _TURNS and _swaps(node) and _operand(node.args[0]) is of:
        return True
    return of.target in _TURNS and _swaps(of) and _operand(node) is same(of.args[0])
