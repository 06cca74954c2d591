"""Message passing over edge lists becomes products with a sparse matrix: SpMM forward, SpMM with the transpose backward, and
SDDMM for the gradients of weights.

    %s = index_select(%h, 0, select(%edge_index, 0, 0))
    %m = mul(view(%norm, [-1, 1]), %s)                       →   gossamer::aggregate(%h, [%edge_index], [], None, n, "3f2a…")
    %y = scatter_add(zeros, 0, expand(…, %edge_index), %m)

All that depends on the structure alone (self loops, degrees, normalised weights) goes with it, and is computed once for an
edge list, not at every call.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import ClassVar

import torch
from torch import fx

from gossamer.backend.calls import message_ops as ops
from gossamer.backend.devices.device import device_of
from gossamer.backend.edges.attention import attention_at
from gossamer.backend.edges.attention import replace as replace_attention
from gossamer.backend.edges.spelling import Operation, PerNode
from gossamer.backend.edges.structure_values import remembered
from gossamer.backend.graph.backward_part import BackwardPart, JointGraph, between
from gossamer.backend.graph.edge_expressions import Structure, part_sizes_from_values
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import hint, in_training, is_backward
from gossamer.backend.graph.refused import Refused
from gossamer.backend.graph.size_assertions import drop_vain_assertions
from gossamer.backend.messages.message_edges import MessageEdges
from gossamer.backend.messages.message_extremes import Extreme, extremes
from gossamer.backend.messages.message_patterns import (
    SCATTERS,
    Aggregation,
    EdgeProducts,
    Factor,
    aggregation_at,
    edge_products_at,
)
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError
from gossamer.sparsity.edges.edge_attention import attend_edges
from gossamer.sparsity.edges.sorted_edges import SortedEdges

aten = torch.ops.aten

_GAIN = 3.0
"""Elements of gathered rows that a product takes in the time in which gather and scatter move one."""
_SORT = 55.0
_SORT_CALLS = 10
"""Elements that gather and scatter move in the time in which an edge is sorted, and calls in that in which any list is."""

_SCORE = 16
"""The same for a score: two gathers, a maximum, an exponential, a sum and a division of each edge and head are left out. Over
edges by the thousand it is 26, over those by the hundred thousand, where gathered rows come from memory, 7 (Zen 5)."""
_FEW_HEADS, _ATTENTION = 9, 100e3
"""Elements in the time of an edge of attention with few heads, its lanes, and in that of its call beside a product's."""


class MessagePassing:
    """Gather and scatter over an edge list become operations on a sparse matrix."""

    name: ClassVar[str] = "message-passing"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces message passing; the decisions in the order of the graph."""
        if not any(n.target in SCATTERS for n in graph.nodes):
            return []
        part_sizes_from_values(graph, context.inputs)
        structure = Structure.of(graph, context.inputs)
        aggregations = _aggregations(graph, structure)
        if not any(a.gather for a in aggregations) and not any(extremes(graph, structure)):
            return []
        joint = JointGraph(graph) if in_training(graph) else None
        rewriting = _Rewriting(structure, joint, context.inputs, context.options)
        rewriting.count([*aggregations, *_products(graph, structure)])
        decisions = [d for node in [a.node for a in aggregations] for d in rewriting.take_attention(node)]
        graph.eliminate_dead_code()  # what attention was made of
        for each in list(extremes(graph, structure)):
            decisions += rewriting.take_extreme(each)
        graph.eliminate_dead_code()
        place = {node: number for number, node in enumerate(graph.nodes)}
        found: list[Aggregation | EdgeProducts] = [*_aggregations(graph, structure), *_products(graph, structure)]
        found.sort(key=lambda each: place[each.node])
        decisions += [rewriting.take(each) for each in found]
        graph.eliminate_dead_code()
        drop_vain_assertions(graph)
        rewriting.remember(graph)
        graph.eliminate_dead_code()
        drop_vain_assertions(graph)
        return decisions


def _aggregations(graph: fx.Graph, structure: Structure) -> list[Aggregation]:
    return [a for n in graph.nodes if (a := aggregation_at(n, structure)) is not None]


def _products(graph: fx.Graph, structure: Structure) -> list[EdgeProducts]:
    return [p for n in graph.nodes if (p := edge_products_at(n, structure)) is not None]


class _Rewriting:
    """The replacements in one graph."""

    def __init__(self, structure: Structure, joint: JointGraph | None, inputs: Inputs, options: Options) -> None:
        self._structure, self._joint, self._inputs, self._options = structure, joint, inputs, options
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._uses: Counter[str] = Counter()
        self._sorted: set[fx.Node] = set()

    def count(self, found: Sequence[Aggregation | EdgeProducts]) -> None:
        """Notes how many operations each edge list serves."""
        self._uses.update(self._sorted_list(each) for each in found)

    def _sorted_list(self, found: Aggregation | EdgeProducts) -> str:
        """A name for what has to be sorted."""
        if isinstance(found, Aggregation):
            return self._structure.cut(found.gather.index if found.gather else None, found.target, None).key
        return self._structure.cut(found.right.index, found.left.index, None).key

    def take(self, found: Aggregation | EdgeProducts) -> Decision:
        """Replaces one piece of message passing, if that pays."""
        aggregates = isinstance(found, Aggregation)
        decision = self._judge(found, "aggregation" if aggregates else "edge products", "rows" if aggregates else "sample")
        if decision.sparse:
            emit = Emitter(found.node, self._replaced)
            self._put(
                found.node, self._aggregate(found, emit) if isinstance(found, Aggregation) else self._products(found, emit)
            )
        return decision

    def take_attention(self, node: fx.Node) -> list[Decision]:
        """Replaces the attention, with its gradients, whose result a node is, if that pays."""
        aggregation = aggregation_at(node, self._structure)
        if aggregation is None:
            return []
        try:
            edges = MessageEdges.of(aggregation, self._structure)
            found = edges and attention_at(edges.forward, edges.aggregation.message.meta["val"].shape[1:], edges, self._joint)
        except Refused as problem:
            return [self._dense(aggregation, "graph attention", f"softmax and sums stay apart: {problem}", None)]
        if not edges or not found:
            return []
        of = edges.aggregation
        decision = self._judge(of, "graph attention", "edges", found.heads)
        if not decision.sparse:
            return []  # its parts are judged one by one
        expression = self._structure.cut(edges.source.node, edges.target.node, None)
        key = ops.edge_list(expression, self._options.verify)
        before = [list(expression.leaves), list(expression.numbers), of.size]
        replace_attention(found, Operation(ops.attend, ops.attend_backward, before, [key]), Emitter(node, {}))
        return [decision, *([replace(decision, op="graph attention backward")] if found.trains else [])]

    def take_extreme(self, found: Extreme) -> list[Decision]:
        """Replaces maxima or minima with their gradient, if that pays."""
        of, backward, kept = self._with_gradient(found.aggregation)
        decision = self._judge(of, f"{found.kind} aggregation", "edges")
        if not decision.sparse:
            return [decision]
        emit = Emitter(of.node, self._replaced)
        x = PerNode(emit.now(of.source)).read([found.features], emit)
        expression = self._structure.cut(of.gather.index if of.gather else None, of.target, None)
        leaves, key = [list(expression.leaves), list(expression.numbers)], ops.edge_list(expression, self._options.verify)
        y = emit(ops.extreme, x, *leaves, emit.now(of.size), found.kind, key)
        self._put(of.node, PerNode(of.node).written(y, emit))
        if backward is None:
            return [replace(decision, reason=f"{decision.reason}; the gradient stays dense: {kept}") if kept else decision]
        if not backward.gradients[of.source]:
            return [decision]
        (place,) = backward.gradients[of.source]
        emit = Emitter(place, self._replaced)
        rows = PerNode(emit.now(backward.upstream)).read([found.features], emit)
        new = emit(ops.extreme_backward, rows, x, y, *leaves, found.kind, key)
        self._put(place, PerNode(of.source).written(new, emit))
        return [decision, replace(decision, op=f"{decision.op} backward")]

    def _with_gradient(self, of: Aggregation) -> tuple[Aggregation, BackwardPart | None, str]:
        """An aggregation, of gathered rows or of messages as they are, with its gradient, or why that is not known."""
        reason = ""
        for each in (of, replace(of, gather=None)):
            try:
                if self._joint is not None:
                    return each, self._joint.part(between([each.source], of.node), [each.source], of.node), ""
            except Refused as problem:
                reason = str(problem)
        return of, None, reason

    def _judge(self, found: Aggregation | EdgeProducts, op: str, schedule: str, scores: int = 0) -> Decision:
        """Whether it pays; an attention computes so many scores for each edge, too."""
        leaves, edges = self._leaves(found), self._edges(found)
        moved = edges * (_features(found) + _SCORE * scores)
        value = found.node.meta["val"]
        call = device_of(value.device).edge_call
        # A list whose size is left open is most likely another one at every call, and is sorted for it.
        uses = max(1, self._uses[self._sorted_list(found)])
        sorting = (_SORT * edges + _SORT_CALLS * call) / uses if _is_open(leaves) else 0.0
        attending = edges * max(_SCORE * scores / _GAIN, _FEW_HEADS) + _ATTENTION if scores else 0.0
        product = edges * _features(found) / _GAIN + attending + call
        gain = moved / (product + sorting)
        reason = self._too_slow(gain, moved / product)
        problem = None if reason else _missing_kernel(value.dtype, schedule, value.device)
        if problem is not None:
            if self._options.strict:
                raise problem
            warnings.warn(f"gossamer leaves message passing over {self._name(found)} dense: {problem}", stacklevel=2)
            reason = FAILED
        op = f"{op} backward" if is_backward(found.node) else op
        if reason is not None:
            return self._dense(found, op, reason, gain)
        self._sorted.update(leaves)
        shape, density = _shape(found, edges)
        return Decision(self._name(found), op, shape, density, "CSR", schedule, True, "message passing over an edge list", gain)

    def _dense(self, found: Aggregation | EdgeProducts, op: str, reason: str, gain: float | None) -> Decision:
        shape, density = _shape(found, self._edges(found))
        return Decision(self._name(found), op, shape, density, None, None, False, reason, gain)

    def _leaves(self, found: Aggregation | EdgeProducts) -> tuple[fx.Node, ...]:
        """What the edge list is computed from."""
        return self._structure.cut(_index(found)).leaves

    def _name(self, found: Aggregation | EdgeProducts) -> str:
        return " ".join(map(self._inputs.name, self._leaves(found))) or _index(found).name

    def _edges(self, found: Aggregation | EdgeProducts) -> int:
        """About how many edges there are."""
        size = hint(_index(found).meta["val"].shape[0])
        return size or max((hint(s) or 0 for leaf in self._leaves(found) for s in leaf.meta["val"].shape), default=0)

    def _too_slow(self, gain: float, sorted_before: float) -> str | None:
        """Why a gain is too small, with sorting and without; None if it is not."""
        least = self._options.min_gain
        if gain >= least:
            return None
        if sorted_before >= least:
            return f"edges that may be others at every call: to sort them each time leaves no gain of {least:g}x"
        return f"too small for a gain of {least:g}x"

    def _put(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self._replaced[old] = new

    def remember(self, graph: fx.Graph) -> None:
        """Makes values that scatter over the structure alone, such as degrees, be computed when it is new.

        Those of edges that no product takes stay in the graph: to look them up takes longer where edges are few, and where
        they are others at every call.
        """
        for node in [n for n in graph.nodes if n.op == "call_function" and n in self._structure]:
            value = node.meta["val"]
            ends = isinstance(value, torch.Tensor) and any(user not in self._structure for user in node.users)
            if not ends or not value.is_floating_point() or None in map(hint, value.shape):
                continue
            expression = self._structure.cut(node)
            if not any(n.target in SCATTERS for n in expression.evaluate.graph.nodes):
                continue
            if self._sorted.isdisjoint(expression.leaves):
                continue
            new = remembered(node, expression, self._options.verify)
            for user in [user for user in node.users if new and user not in self._structure]:
                user.replace_input_with(node, new)

    def _aggregate(self, found: Aggregation, emit: Emitter) -> fx.Node:
        trail = list(found.message.meta["val"].shape[1:])
        rows, weight, known = found.message, None, None
        if found.gather is not None:
            rows = found.gather.x
            weight = _product(found.factors, emit)
            if weight is not None and self._is_known(found.factors):
                weight, known = None, weight
        x = PerNode(emit.now(rows)).read(trail, emit)
        expression = self._structure.cut(found.gather.index if found.gather else None, found.target, known)
        key = ops.edge_list(expression, self._options.verify, found.mean)
        y = emit(ops.aggregate, x, list(expression.leaves), list(expression.numbers), weight, emit.now(found.size)
                 if found.size is not None else emit.sizes(found.base, (0,))[0], key)  # type: ignore[arg-type]  # fmt: skip
        y = PerNode(found.node).written(_scaled(y, found.scale, emit), emit)
        return y if found.base is None else emit(aten.add.Tensor, emit.now(found.base), y)

    def _products(self, found: EdgeProducts, emit: Emitter) -> fx.Node:
        value = found.product.meta["val"]
        heads, features = prod(value.shape[1 : found.kept]), prod(value.shape[found.kept :])
        left, right = (PerNode(emit.now(gather.x)).read([heads, features], emit) for gather in (found.left, found.right))
        expression = self._structure.cut(found.right.index, found.left.index, None)
        assert found.left.index is not None
        edges = emit.sizes(found.left.index, (0,))[0]
        leaves, key = [list(expression.leaves), list(expression.numbers)], ops.edge_list(expression, self._options.verify)
        y = emit(ops.edge_products, left, right, *leaves, edges, key)
        return PerNode(found.node).written(_scaled(y, found.scale, emit), emit)

    def _is_known(self, factors: Sequence[Factor]) -> bool:
        ones = all(size == 1 for f in factors for size in f.node.meta["val"].shape[1:])
        return ones and all(f.node in self._structure for f in factors)


def _scaled(node: fx.Node, scale: float, emit: Emitter) -> fx.Node:
    return node if scale == 1 else emit(aten.mul.Tensor, node, scale)


def _product(factors: Sequence[Factor], emit: Emitter) -> fx.Node | None:
    """The weights of edges as one tensor."""
    product = None
    for factor in factors:
        node = emit.now(factor.node)
        if product is None:
            product = emit(aten.reciprocal.default, node) if factor.inverse else node
        else:
            product = emit(aten.div.Tensor if factor.inverse else aten.mul.Tensor, product, node)
    return product


def _index(found: Aggregation | EdgeProducts) -> fx.Node:
    index = found.target if isinstance(found, Aggregation) else found.left.index
    assert index is not None
    return index


def _is_open(leaves: Sequence[fx.Node]) -> bool:
    """Whether the size of what an edge list is computed from may be another one at the next call."""
    return any(isinstance(size, torch.SymInt) for leaf in leaves for size in leaf.meta["val"].shape)


def _features(found: Aggregation | EdgeProducts) -> int:
    rows = found.message if isinstance(found, Aggregation) else found.product
    return prod(hint(size) or 1 for size in rows.meta["val"].shape[1:])


def _shape(found: Aggregation | EdgeProducts, edges: int) -> tuple[tuple[int, ...], float]:
    """The sizes of the matrix, and the share of its elements that are stored."""
    if isinstance(found, Aggregation):
        columns = hint(found.gather.x.meta["val"].shape[0]) if found.gather else edges
        rows = hint(found.node.meta["val"].shape[0])
    else:
        rows, columns = (hint(gather.x.meta["val"].shape[0]) for gather in (found.left, found.right))
    shape = rows or 0, columns or 0
    return shape, min(1.0, edges / max(1, prod(shape)))


@lru_cache
def _missing_kernel(dtype: torch.dtype, schedule: str, place: torch.device) -> CompileError | None:
    """Why a schedule has no kernel for this type; None if there is one, ready to run."""
    one, edge = torch.ones(1, 1, 1, dtype=dtype, device=place), torch.zeros(1, dtype=torch.int64, device=place)
    edges = SortedEdges.of(edge, edge, 1, 1)
    try:
        if schedule == "rows":
            edges.sums(one, one.flatten())
        elif schedule == "sample":
            edges.products(one, one)
        else:
            attend_edges(edges.positions, edges.coordinates, one, source=one[0], target=one[0])
    except CompileError as problem:
        return problem
    return None
