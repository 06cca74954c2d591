"""The gradients that autograd has made of attention written out, as they stand in a joint graph.

    %gd = bmm(%g, permute(%v)), %gv = bmm(permute(%d), %g)
    %gp = dropout_backward(%gd)
    %gs = p * (gp - sum(p * gp))                                  one operation, or these
    %gq = bmm(%gs, %k), %gk = bmm(permute(%q), %gs)               and, if what is added has a gradient, sums of %gs

%g is the gradient of the result, %d are the weights after dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.attention.folded_heads import CONVERTS, is_same, is_turned, operand, plain
from gossamer.backend.graph.dropout import Dropout
from gossamer.backend.graph.nodes import SPREADS, same
from gossamer.backend.graph.refused import Refused

aten = torch.ops.aten

_GRADIENT = {
    "aten.mul.Tensor", "aten.div.Tensor", "aten.sub.Tensor", "aten.neg.default", "aten.sum.dim_IntList", "prims.fma.default",
    "aten._softmax_backward_data.default", "aten.tanh_backward.default", "aten.where.self", "aten.masked_fill.Scalar",
    "aten.native_dropout_backward.default",
}  # fmt: skip
"""What lies between the gradient of the weights and the products that it ends in; by name, for Inductor registers some of
them when it is imported."""


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


def gradients_of(
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
    if len(starts) != 1 or not is_turned(starts[0].args[1], product.args[1]):
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
    q, k = (operand(a) for a in scored.args[-2:])
    of_q = [e for e in ends if e.args[0] in after and is_turned(e.args[1], k)]
    of_k = [e for e in ends if e.args[1] in after and is_turned(e.args[0], q)]
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
    return summed.meta["val"].dim() == 4 and {0, 1}.issuperset(axes_of(node)) and plain(summed) is plain(scores)


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
            if stops(user) or not (user.target in (aten.bmm.default, *SPREADS, *CONVERTS) or str(user.target) in _GRADIENT):
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
        return is_same(node.args[1], weights)
    if node.target is aten.sub.Tensor:  # p * g - p * sum
        weighted, rest = node.args
        factors = rest.args if isinstance(rest, fx.Node) and rest.target is aten.mul.Tensor else ()
        total = next((a for a in factors if not is_same(a, weights)), None)
    elif str(node.target) == "prims.fma.default":  # -p * sum + p * g
        negative, total, weighted = node.args
        factors = same(negative).args if same(negative).target is aten.neg.default else ()
    else:
        return False
    if not any(is_same(a, weights) for a in factors) or not isinstance(total, fx.Node):
        return False
    return total.target is aten.sum.dim_IntList and total.args[0] is weighted


def _before(user: fx.Node, between: set[fx.Node]) -> bool:
    """Whether all that is made of it is between."""
    return all(after in between or (str(after.target) in _GRADIENT and _before(after, between)) for after in user.users)
