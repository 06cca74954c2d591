"""Computes chains of dense products in the cheaper order, (A B) C or A (B C), and applies scales to the smallest matrix.

    %p = mm(%g, %x)         [M, K], K M T                       %h = mm(%x, %v)         [T, R]
    %q = mm(%p, %v)         [M, R]                         →    %q = mm(%g, %h)         [M, R], in (K + M) R T multiply-adds

    %s = mul(%g, 2.0)       [T, M]                         →    %h = mm(%g, %b)         [T, R]
    %h = mm(%s, %b)         [T, R]                              %q = mul(%h, 2.0)

Gradients of factors look like the left side, because autograd first makes the gradient of the whole matrix. If other nodes also
use the first product, it stays, and neither order's cost includes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import WIDE_FLOATS, arguments, hint, phase
from gossamer.backend.graph.weight_expressions import weight_behind
from gossamer.backend.operations.densities import Sketch, cost_in_order
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.report.report import Decision

aten = torch.ops.aten

_GAIN = 1.5
"""Least factor by which another order must be cheaper. It also adds up in another order, which changes the rounding."""
_UNKNOWN = 512
"""Assumed size of an open dimension: the tokens, in training."""


class AssociateProducts:
    """Computes chains of dense products in the cheaper order."""

    name: ClassVar[str] = "associate-products"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Reorders products where that is cheaper. Returns a decision for each product that is no longer computed."""
        values, decisions = {node: static.tensor for node, static in context.inputs.match(graph).items()}, []
        for node in list(graph.nodes):
            if node.target is aten.mul.Tensor:
                _move_scale(node)
        for node in list(graph.nodes):
            pairs = _pairs(node) if _is_product(node) else []
            if not pairs:
                continue
            costs = [pair.costs(partial(_sketch, values)) for pair in pairs]
            before, after = costs[0][0] + sum(second for _, second, _ in costs), sum(other for *_, other in costs)
            if before < _GAIN * after:
                continue
            for pair in pairs:
                pair.reorder()
            decisions.append(_decision(node, pairs, before / after, context.inputs))
        graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True)
class _Pair:
    """A product a b, and a second product of its result with a third matrix.

    second    the node of the second product
    a, b, c   the factors of (a b) c if `left`, else of c (a b), as (node, whether the factor is its transpose)
    """

    second: fx.Node
    a: tuple[fx.Node, bool]
    b: tuple[fx.Node, bool]
    c: tuple[fx.Node, bool]
    left: bool

    def costs(self, sketch: Callable[[fx.Node], Sketch]) -> tuple[float, float, float]:
        """Returns the costs of the first and of the second product as written, and of both together in the other order."""
        a, b, c = (sketch(node).transposed if turned else sketch(node) for node, turned in (self.a, self.b, self.c))
        left, middle, right = (a, b, c) if self.left else (c, a, b)
        first, second = cost_in_order(left, middle, right, self.left)
        return first, second, sum(cost_in_order(left, middle, right, not self.left))

    def reorder(self) -> None:
        """Replaces the second product by the other order."""
        emit = Emitter(self.second)
        if self.left:
            result = _mm(emit, self.a, (_mm(emit, self.b, self.c), False))
        else:
            result = _mm(emit, (_mm(emit, self.c, self.a), False), self.b)
        self.second.replace_all_uses_with(result)


def _pairs(first: fx.Node) -> list[_Pair]:
    """Returns a pair for each product that reads the first one; nothing if other operations read it, too."""
    found, pending = list[_Pair](), [(user, first, False) for user in first.users]
    a, b = ((node, False) for node in arguments(first))
    while pending:
        user, value, turned = pending.pop()
        if _is_transpose(user):
            pending += [(other, user, not turned) for other in user.users]
            continue
        if not _is_product(user) or phase(user) != phase(first):
            return []
        left, right = arguments(user)
        if left is right or any(pair.second is user for pair in found):
            return []  # both factors are the first product, which stays in any order
        first_factor, second_factor = (_other(b), _other(a)) if turned else (a, b)
        third = right if value is left else left, False
        found.append(_Pair(user, first_factor, second_factor, third, value is left))
    return found


def _other(factor: tuple[fx.Node, bool]) -> tuple[fx.Node, bool]:
    return factor[0], not factor[1]


def _move_scale(scaled: fx.Node) -> None:
    """Rewrites mm(c x, w) as c mm(x, w), if only products read c x, and their results are smaller than x."""
    x, c = arguments(scaled)
    if isinstance(c, fx.Node) or not isinstance(x, fx.Node) or scaled.meta["val"].dtype not in WIDE_FLOATS:
        return
    if x.meta["val"].dtype != scaled.meta["val"].dtype:
        return
    products, pending = dict[fx.Node, None](), list(scaled.users)
    while pending:
        user = pending.pop()
        if _is_transpose(user) or (user.target is aten.view.default and user.meta["val"].dim() == 2):
            pending += user.users
        elif _is_product(user) and phase(user) == phase(scaled) and user not in products:
            products[user] = None
        else:
            return
    if not products or sum(_size(each.meta["val"].numel()) for each in products) >= _size(scaled.meta["val"].numel()):
        return
    for product in products:
        followers = list(product.users)
        moved = Emitter(product, before=product.next)(aten.mul.Tensor, product, c)
        for follower in followers:
            follower.replace_input_with(product, moved)
    scaled.replace_all_uses_with(x)


def _is_product(node: fx.Node) -> bool:
    return node.target is aten.mm.default and node.meta["val"].dtype in WIDE_FLOATS


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return list(arguments(node)[1]) == [1, 0]
    return node.target is aten.t.default


def _mm(emit: Emitter, *factors: tuple[fx.Node, bool]) -> fx.Node:
    return emit(aten.mm.default, *(emit(aten.permute.default, node, [1, 0]) if turned else node for node, turned in factors))


def _sketch(values: dict[fx.Node, torch.Tensor], node: fx.Node) -> Sketch:
    """Returns the sketch of a matrix: its sizes and, for a weight, its density."""
    rows, columns = map(_size, node.meta["val"].shape)
    weight = weight_behind(node, values) if node in computed_from(node.graph, values) else None
    return Sketch(rows, columns, 1.0 if weight is None else weight.density)


def _size(size: Any) -> int:
    known = hint(size)
    return _UNKNOWN if known is None else max(1, known)


def _decision(first: fx.Node, pairs: list[_Pair], gain: float, inputs: Inputs) -> Decision:
    """Returns the decision for the report."""
    names = [name_of(node, inputs) for pair in pairs for node, _ in (pair.c, pair.a, pair.b) if node.op == "placeholder"]
    rows, columns = (_size(size) for size in first.meta["val"].shape)
    reason = f"a product of {rows}x{columns} is not made: the products around it come first"
    return Decision(
        names[0] if names else str(first), "product order", (rows, columns), 1.0, None, "order", False, reason, gain
    )
