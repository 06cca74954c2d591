"""Computes the products of a sparse matrix A and dense matrices X and W in the cheaper order: (A X) W or A (X W).

    %d = mm(%x, %w)                                              %z = gossamer::einsum([A, %x])
    %y = gossamer::einsum([A, %d])                         ↔     %y = mm(%z, %w)
    %b = gossamer::einsum([Aᵀ, %g])                              %gx = gossamer::einsum([Aᵀ, mm(%g, %wᵀ)])
    %gx = mm(%b, %wᵀ);  %gw = mm(%xᵀ, %b)                        %gw = mm(%zᵀ, %g)

The cost of A grows with the number of columns that it multiplies: those of x w on the left, those of x on the right. In
training, the right side does not need the second product with A if x needs no gradient, such as the features of a graph.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.graph.backward_part import JointGraph
from gossamer.backend.graph.einsum_calls import Call, call_at, hint
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import arguments, in_training, is_backward, same, users
from gossamer.backend.graph.refused import Refused
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.report.report import Decision

aten, ours = torch.ops.aten, torch.ops.gossamer

_GATHERED = 12.0
"""Cost of an element of a row that A gathers, in multiply-adds of a dense product."""
_GAIN = 1.1
"""Least factor by which the other order must be cheaper."""


class OrderProducts:
    """Computes (A X) W and A (X W) in the cheaper order."""

    name: ClassVar[str] = "order-products"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Reorders products where that is cheaper. Returns a decision for each pair of products."""
        if not graph.find_nodes(op="call_function", target=ours.einsum.default):
            return []
        joint = JointGraph(graph) if in_training(graph) else None
        decisions = []
        for node in list(graph.nodes):
            pair = _Pair.at(node)
            if pair is not None:
                try:
                    gradients = pair.gradients(joint)
                except Refused as problem:
                    decisions.append(pair.decision(context.inputs, f"as written: {problem}"))
                    continue
                costs = pair.costs(gradients)
                better = costs[not pair.aggregates_first] * _GAIN < costs[pair.aggregates_first]
                decisions.append(pair.choice(better, costs, gradients, context.inputs))
                if better:
                    pair.reorder(gradients)
        graph.eliminate_dead_code()
        return decisions


@dataclass(frozen=True, eq=False)
class _Gradients:
    """The gradients of a pair in a joint graph.

    upstream        g, the gradient of the result
    transpose       a call that multiplies with Aᵀ
    into_x, into_w  the nodes that compute the gradients of the factors
    """

    upstream: fx.Node
    transpose: Call
    into_x: tuple[fx.Node, ...]
    into_w: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class _Pair:
    """A product with a sparse matrix and one with a dense matrix, one after the other.

    sparse, dense     the products
    aggregates_first  whether the sparse product is the first one: (A x) w
    x, w              the dense factors
    """

    sparse: Call
    dense: fx.Node
    aggregates_first: bool
    x: fx.Node
    w: fx.Node

    @classmethod
    def at(cls, node: fx.Node) -> "_Pair | None":
        """Returns the pair whose second product is this forward node, else None."""
        if is_backward(node):
            return None
        call = _aggregation(node, forward=True)
        if call is not None:
            first = same(call.dense[0].values)
            pair = cls(call, first, False, *arguments(first)) if first.target is aten.mm.default else None
        else:
            second = _mm(node)
            call = _aggregation(same(second[0]), forward=True) if second else None
            pair = cls(call, node, True, call.dense[0].values, second[1]) if second and call else None
        return pair if pair is not None and pair._is_known() else None

    def _is_known(self) -> bool:
        shapes = [n.meta["val"].shape for n in (self.x, self.w)]
        return all(len(shape) == 2 for shape in shapes) and all(isinstance(n, int) for n in (shapes[0][1], shapes[1][1]))

    @property
    def _products(self) -> tuple[fx.Node, fx.Node]:
        """The nodes of the first and the second product."""
        return (self.sparse.node, self.dense) if self.aggregates_first else (self.dense, self.sparse.node)

    def gradients(self, joint: JointGraph | None) -> _Gradients | None:
        """Returns the gradients in the joint graph; None if there are none.

        Raises Refused if the graph needs values that the other order would not compute.
        """
        first, second = self._products
        if joint is None:
            if users(first) != [second]:
                raise Refused("the first product is used elsewhere")
            return None
        bias = arguments(second)[:1] if second.target is aten.addmm.default else ()
        backward = joint.part([first, second], [self.x, self.w, *bias], second)
        if backward.upstream is None:
            return None
        for node in sorted(backward.nodes):
            call = _aggregation(node, forward=False)
            if call is not None and _same_matrix(call, self.sparse):
                return _Gradients(backward.upstream, call, backward.gradients[self.x], backward.gradients[self.w])
        raise Refused("its gradient has no product with the transpose of A")

    def costs(self, gradients: _Gradients | None) -> tuple[float, float]:
        """Returns the costs of A (x w), which transforms first, and of (A x) w, which aggregates first, in multiply-adds."""
        entries = hint(self.sparse.sparse[0].values.meta["val"].shape[0])
        rows, columns = (hint(size) for size in self._sizes())
        narrow, wide = self.x.meta["val"].shape[1], self.w.meta["val"].shape[1]
        again = gradients is not None
        into_x = gradients is not None and bool(gradients.into_x)
        dense = (1 + again + into_x) * narrow * wide
        first = columns * dense + _GATHERED * entries * wide * (1 + again)
        return first, rows * dense + _GATHERED * entries * narrow * (1 + into_x)

    def _sizes(self) -> tuple[Any, Any]:
        rows = self.sparse.sparse[0].rows
        assert rows is not None
        letter = self.sparse.spec.result.letters[0]
        return rows.sizes if rows.row == letter else (rows.sizes[1], rows.sizes[0])

    def reorder(self, gradients: _Gradients | None) -> None:
        """Exchanges the two products, and rewrites their gradients."""
        _, second = self._products
        emit = Emitter(second)
        if self.aggregates_first:
            result = _times(emit, self.sparse, emit(aten.mm.default, self.x, self.w))
            if self.dense.target is aten.addmm.default:
                result = emit(aten.add.Tensor, result, arguments(self.dense)[0])
            if gradients is not None:
                self._transform_gradients(gradients)
        else:
            aggregated = _times(emit, self.sparse, self.x)
            result = emit(aten.mm.default, aggregated, self.w)
            if gradients is not None:
                self._aggregate_gradients(gradients, aggregated)
        second.replace_all_uses_with(result)

    def _transform_gradients(self, gradients: _Gradients) -> None:
        """Writes the gradients of A (X W): b Wᵀ and Xᵀ b, with b = Aᵀ g."""
        emit = Emitter(min(_transposed(node) or node for node in (*gradients.into_x, *gradients.into_w)))
        b = _times(emit, gradients.transpose, gradients.upstream)
        for node in gradients.into_x:
            _put(node, (b, False), (self.w, True))
        for node in gradients.into_w:
            _put(node, (self.x, True), (b, False))

    def _aggregate_gradients(self, gradients: _Gradients, aggregated: fx.Node) -> None:
        """Writes the gradients of (A X) W: Aᵀ (g Wᵀ) and zᵀ g, with z = A X."""
        for node in gradients.into_x:
            emit = Emitter(node)
            transposed = emit(aten.permute.default, self.w, [1, 0])
            product = emit(aten.mm.default, gradients.upstream, transposed)
            node.replace_all_uses_with(_times(emit, gradients.transpose, product))
        for node in gradients.into_w:
            _put(node, (aggregated, True), (gradients.upstream, False))

    def choice(self, better: bool, costs: tuple[float, float], gradients: _Gradients | None, inputs: Inputs) -> Decision:
        """Returns the decision about the order for the report."""
        narrow, wide = self.x.meta["val"].shape[1], self.w.meta["val"].shape[1]
        aggregates = self.aggregates_first != better
        form, columns = ("(A X) W", narrow) if aggregates else ("A (X W)", wide)
        training = ", gradients included" if gradients is not None else ""
        now = "" if better else ", as written"
        gain = max(costs) / max(1.0, min(costs)) if better else None
        return self.decision(inputs, f"{form}{now}: A is multiplied with {columns} columns{training}", gain)

    def decision(self, inputs: Inputs, reason: str, gain: float | None = None) -> Decision:
        """Returns a decision for the report."""
        matrix = self.sparse.sparse[0]
        rows, columns = (hint(size) for size in self._sizes())
        assert matrix.format is not None
        density = min(1.0, hint(matrix.values.meta["val"].shape[0]) / max(1, prod((rows, columns))))
        name = name_of(matrix.arrays[0], inputs)
        return Decision(name, "product order", (rows, columns), density, matrix.format.name, "order", True, reason, gain)


def _aggregation(node: fx.Node, forward: bool) -> Call | None:
    """Returns a node's product of a sparse matrix in rows and a dense one, "ij,jk->ik" forward or "ij,ik->jk" backward; else
    None.
    """
    call = call_at(node, ours.einsum.default)
    if call is None or len(call.sparse) != 1 or len(call.dense) != 1:
        return None
    rows, dense, result = call.sparse[0].rows, call.dense[0].letters, call.spec.result.letters
    if rows is None or len(dense) != 2 or len(result) != 2 or dense[1] != result[1] or dense[1] in call.sparse[0].letters:
        return None
    letters = call.sparse[0].letters if forward else call.sparse[0].letters[::-1]
    return call if result[0] + dense[0] == letters else None


def _same_matrix(a: Call, b: Call) -> bool:
    """Whether two calls multiply with the same sparse matrix, or its transpose."""
    left, right = a.sparse[0], b.sparse[0]
    return left.format == right.format and [same(n) for n in left.arrays] == [same(n) for n in right.arrays]


def _times(emit: Emitter, call: Call, dense: fx.Node) -> fx.Node:
    """Emits the call with another dense matrix."""
    arrays, sizes, spec = arguments(call.node)
    old = call.dense[0].values
    at = sum(operand.operand.arrays for operand in call.operands[: call.operands.index(call.dense[0])])
    given = list(arrays)
    assert given[at] is old
    given[at] = dense
    return emit(ours.einsum.default, given, sizes, spec)


def _mm(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns the factors of mm, or of addmm without scales; None for other nodes."""
    if node.target is aten.mm.default:
        return arguments(node)
    if node.target is aten.addmm.default and not node.kwargs:
        return arguments(node)[1:]
    return None


def _transposed(node: fx.Node) -> fx.Node | None:
    """Returns the matrix whose transpose a node is; None for other nodes."""
    node = same(node)
    if node.target is aten.t.default or (node.target is aten.permute.default and list(arguments(node)[1]) == [1, 0]):
        return same(arguments(node)[0])
    return None


def _put(place: fx.Node, *factors: tuple[fx.Node, bool]) -> None:
    """Replaces a node by a product of two matrices, some of them transposed. The result has the node's layout in memory."""
    inner = _transposed(place)
    if inner is not None:
        place, factors = inner, tuple((factor, not across) for factor, across in reversed(factors))
    emit = Emitter(place)
    given = [emit(aten.permute.default, factor, [1, 0]) if across else factor for factor, across in factors]
    place.replace_all_uses_with(emit(aten.mm.default, *given))
