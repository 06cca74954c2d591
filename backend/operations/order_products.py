"""(A X) W or A (X W): the products with a sparse matrix and a dense one that follow each other, in the cheaper order.

    %d = mm(%x, %w)                                              %z = gossamer::einsum([A, %x])
    %y = gossamer::einsum([A, %d])                         ↔     %y = mm(%z, %w)
    %b = gossamer::einsum([Aᵀ, %g])                              %gx = gossamer::einsum([Aᵀ, mm(%g, %wᵀ)])
    %gx = mm(%b, %wᵀ);  %gw = mm(%xᵀ, %b)                        %gw = mm(%zᵀ, %g)

What A costs grows with the columns that it is multiplied with: those of x on the right, those of x w on the left. In training
the right side does without the second of these products if x needs no gradient, as the features of a graph do not.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.graph.einsum_calls import Call, call_at, hint
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import arguments, same, users
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.report.report import Decision

aten, ours = torch.ops.aten, torch.ops.gossamer

_GATHERED = 12.0
"""What an element of a row that A gathers costs, in multiply-adds of a dense product."""
_GAIN = 1.1
"""What another order has to be cheaper by."""


class OrderProducts:
    """(A X) W and A (X W) come in the cheaper order."""

    name: ClassVar[str] = "order-products"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Reorders where that pays; a decision for each pair of products."""
        decisions = []
        for node in list(graph.nodes):
            pair = _Pair.at(node)
            if pair is not None:
                costs = pair.costs()
                better = costs[not pair.aggregates_first] * _GAIN < costs[pair.aggregates_first]
                decisions.append(pair.decision(better, context.inputs))
                if better:
                    pair.reorder()
        if decisions:
            graph.eliminate_dead_code()
        return decisions


@dataclass(eq=False)
class _Pair:
    """A product with a sparse matrix and one with a dense matrix, one after the other.

    sparse, dense     the nodes; `aggregates_first` says that the sparse product is the first of them
    x, w              what is multiplied
    backward          the product of the transpose with the gradient, and what uses it (or, aggregating first, what it would
                      replace), as far as the graph has them
    """

    sparse: Call
    dense: fx.Node
    aggregates_first: bool
    x: fx.Node
    w: fx.Node
    backward: "_Backward | None" = None

    @classmethod
    def at(cls, node: fx.Node) -> "_Pair | None":
        """The pair whose second product a node is."""
        call = _aggregation(node, forward=True)
        if call is not None:
            first = same(call.dense[0].values)
            if first.target is not aten.mm.default or users(first) != [node]:
                return None
            pair = cls(call, first, False, *arguments(first))
        else:
            second = _mm(node)
            call = _aggregation(same(second[0]), forward=True) if second else None
            if second is None or call is None:
                return None
            pair = cls(call, node, True, call.dense[0].values, second[1])
        return pair if pair._is_known() and pair._find_backward() else None

    def _is_known(self) -> bool:
        shapes = [n.meta["val"].shape for n in (self.x, self.w)]
        return all(len(shape) == 2 for shape in shapes) and all(isinstance(n, int) for n in (shapes[0][1], shapes[1][1]))

    def _find_backward(self) -> bool:
        """Looks for the gradients; False if something else in the graph needs what another order would not compute."""
        if self.aggregates_first:
            others = [user for user in users(self.sparse.node) if user is not self.dense]
            if not others:
                return True
            self.backward = _Backward.of_aggregate_first(self, others)
            return self.backward is not None
        for user in users(same(self.sparse.operands[_at_sparse(self.sparse)].arrays[0])):
            call = _aggregation(user, forward=False)
            if call is not None and _same_matrix(call, self.sparse):
                found = _Backward.of_transform_first(self, call)
                if found is not None:
                    self.backward = found
        return True

    def costs(self) -> tuple[float, float]:
        """Of transforming first, and of aggregating first, in multiply-adds."""
        entries = hint(self.sparse.sparse[0].values.meta["val"].shape[0])
        rows, columns = (hint(size) for size in self._sizes())
        narrow, wide = self.x.meta["val"].shape[1], self.w.meta["val"].shape[1]
        again = self.backward is not None
        into_x = again and self.backward is not None and bool(self.backward.into_x)
        dense = (1 + again + into_x) * narrow * wide
        first = columns * dense + _GATHERED * entries * wide * (1 + again)
        return first, rows * dense + _GATHERED * entries * narrow * (1 + into_x)

    def _sizes(self) -> tuple[Any, Any]:
        rows = self.sparse.sparse[0].rows
        assert rows is not None
        letter = self.sparse.spec.result.letters[0]
        return rows.sizes if rows.row == letter else (rows.sizes[1], rows.sizes[0])

    def reorder(self) -> None:
        """Exchanges the two products, and their gradients."""
        second = self.dense if self.aggregates_first else self.sparse.node
        emit = Emitter(second, {})
        if self.aggregates_first:
            result = _times(emit, self.sparse, emit(aten.mm.default, self.x, self.w))
            if self.dense.target is aten.addmm.default:
                result = emit(aten.add.Tensor, result, arguments(self.dense)[0])
        else:
            aggregated = _times(emit, self.sparse, self.x)
            result = emit(aten.mm.default, aggregated, self.w)
            if self.backward is not None:
                self.backward.without_transpose(aggregated)
        if self.aggregates_first and self.backward is not None:
            self.backward.with_transpose(self.x)
        second.replace_all_uses_with(result)

    def decision(self, better: bool, inputs: Inputs) -> Decision:
        """What the report says."""
        first, second = self.costs()
        narrow, wide = self.x.meta["val"].shape[1], self.w.meta["val"].shape[1]
        aggregates = self.aggregates_first != better
        form, columns = ("(A X) W", narrow) if aggregates else ("A (X W)", wide)
        training = ", gradients included" if self.backward is not None else ""
        now = "" if better else ", as written"
        reason = f"{form}{now}: A is multiplied with {columns} columns{training}"
        rows, columns = (hint(size) for size in self._sizes())
        entries = hint(self.sparse.sparse[0].values.meta["val"].shape[0])
        format = self.sparse.sparse[0].format
        assert format is not None
        density = min(1.0, entries / max(1, prod((rows, columns))))
        gain = max(first, second) / max(1.0, min(first, second)) if better else None
        name = name_of(self.sparse.sparse[0].arrays[0], inputs)
        return Decision(name, "product order", (rows, columns), density, format.name, "order", True, reason, gain)


@dataclass(eq=False)
class _Backward:
    """The gradients of a pair: b = Aᵀ g, and the products into x and into w, each with how it is written.

    gradient   g, that of the result
    transpose  how Aᵀ is multiplied: a call that does so
    into_x     nodes for b P (transforming first), or for Aᵀ (g P), with P
    into_w     nodes for xᵀ b or zᵀ g, and whether it is transposed: bᵀ x or gᵀ z
    """

    gradient: fx.Node
    transpose: Call
    into_x: list[tuple[fx.Node, fx.Node]]
    into_w: list[tuple[fx.Node, bool]]

    @classmethod
    def of_transform_first(cls, pair: _Pair, call: Call) -> "_Backward | None":
        """The gradients that a product of the transpose with the gradient goes to."""
        into_x, into_w = [], []
        for user in _through_transposes(call.node):
            known = _mm(user) if user.target is aten.mm.default else None
            if known is None:
                return None
            left, right = known
            if same(left) is call.node:
                into_x.append((user, right))
            elif same(right) is call.node and _transposed(left) is same(pair.x):
                into_w.append((user, False))
            elif _transposed(left) is call.node and same(right) is same(pair.x):
                into_w.append((user, True))
            else:
                return None
        shapes = [n.meta["val"].shape for n in (call.node, pair.dense)]
        return cls(call.dense[0].values, call, into_x, into_w) if into_w and len(shapes[0]) == len(shapes[1]) else None

    @classmethod
    def of_aggregate_first(cls, pair: _Pair, others: list[fx.Node]) -> "_Backward | None":
        """The gradients that use what was aggregated."""
        into_w: list[tuple[fx.Node, bool]] = []
        gradient: fx.Node | None = None
        for user in [each for other in others for each in ([other] if _transposed(other) is None else users(other))]:
            known = _mm(user) if user.target is aten.mm.default else None
            if known is None:
                return None
            left, right = known
            straight = _transposed(left) is pair.sparse.node
            found = same(right) if straight else _transposed(left)
            if found is None or (not straight and same(right) is not pair.sparse.node) or gradient not in (None, found):
                return None
            gradient = found
            into_w.append((user, not straight))
        if gradient is None:
            return None
        into_x, transpose = [], None
        for user in users(gradient):
            known = _mm(user) if user.target is aten.mm.default else None
            if known is None or same(known[0]) is not gradient:
                continue
            for after in users(user):
                call = _aggregation(after, forward=False)
                if call is not None and _same_matrix(call, pair.sparse) and users(user) == [after]:
                    into_x.append((after, known[1]))
                    transpose = call
        return cls(gradient, transpose, into_x, into_w) if transpose is not None else None

    def without_transpose(self, aggregated: fx.Node) -> None:
        """From transforming first to aggregating first."""
        for node, factor in self.into_x:
            emit = Emitter(node, {})
            node.replace_all_uses_with(_times(emit, self.transpose, emit(aten.mm.default, self.gradient, factor)))
        self._put_into_w(aggregated, self.gradient)

    def with_transpose(self, x: fx.Node) -> None:
        """From aggregating first to transforming first."""
        places = {node: number for number, node in enumerate(self.gradient.graph.nodes)}
        first = min((node for node, _ in [*self.into_x, *self.into_w]), key=places.__getitem__)
        b = _times(Emitter(first, {}), self.transpose, self.gradient)
        for node, factor in self.into_x:
            node.replace_all_uses_with(Emitter(node, {})(aten.mm.default, b, factor))
        self._put_into_w(x, b)

    def _put_into_w(self, features: fx.Node, gradient: fx.Node) -> None:
        for node, transposed in self.into_w:
            emit = Emitter(node, {})
            left, right = (gradient, features) if transposed else (features, gradient)
            node.replace_all_uses_with(emit(aten.mm.default, emit(aten.permute.default, left, [1, 0]), right))


def _aggregation(node: fx.Node, forward: bool) -> Call | None:
    """A product of a sparse matrix in rows and a dense one: "ij,jk->ik" forward, "ij,ik->jk" backward."""
    call = call_at(node, ours.einsum.default)
    if call is None or len(call.sparse) != 1 or len(call.dense) != 1:
        return None
    rows, dense, result = call.sparse[0].rows, call.dense[0].letters, call.spec.result.letters
    if rows is None or len(dense) != 2 or len(result) != 2 or dense[1] != result[1] or dense[1] in call.sparse[0].letters:
        return None
    letters = call.sparse[0].letters if forward else call.sparse[0].letters[::-1]
    return call if result[0] + dense[0] == letters else None


def _at_sparse(call: Call) -> int:
    return next(number for number, operand in enumerate(call.operands) if operand.format is not None)


def _same_matrix(a: Call, b: Call) -> bool:
    """Whether two calls multiply with the same sparse matrix, or its transpose."""
    left, right = a.sparse[0], b.sparse[0]
    return left.format == right.format and [same(n) for n in left.arrays] == [same(n) for n in right.arrays]


def _times(emit: Emitter, call: Call, dense: fx.Node) -> fx.Node:
    """The call with another dense matrix."""
    arrays, sizes, spec = arguments(call.node)
    old = call.dense[0].values
    at = sum(operand.operand.arrays for operand in call.operands[: call.operands.index(call.dense[0])])
    given = list(arrays)
    assert given[at] is old
    given[at] = dense
    return emit(ours.einsum.default, given, sizes, spec)


def _mm(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The factors of mm, or of addmm without scales."""
    if node.target is aten.mm.default:
        return arguments(node)
    if node.target is aten.addmm.default and not node.kwargs:
        return arguments(node)[1:]
    return None


def _transposed(node: fx.Node) -> fx.Node | None:
    """What a matrix is the transpose of."""
    node = same(node)
    if node.target is aten.t.default or (node.target is aten.permute.default and list(arguments(node)[1]) == [1, 0]):
        return same(arguments(node)[0])
    return None


def _through_transposes(node: fx.Node) -> list[fx.Node]:
    """What uses a matrix or its transpose."""
    found = []
    for user in users(node):
        found += users(user) if _transposed(user) is node else [user]
    return found
