"""Rewrites message passing over edge lists as products with a sparse matrix: SpMM forward, SpMM with the transpose backward,
and SDDMM for the gradients of weights.

    %s = index_select(%h, 0, select(%edge_index, 0, 0))
    %m = mul(view(%norm, [-1, 1]), %s)                       →   gossamer::aggregate(%h, [%edge_index], [], None, n, "3f2a…")
    %y = scatter_add(zeros, 0, expand(…, %edge_index), %m)

Values that depend only on the structure, such as self loops, degrees and normalised weights, become part of the operation. It
computes them once for an edge list, not at every call.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.edges.attention import attention_at
from gossamer.backend.edges.attention import replace as replace_attention
from gossamer.backend.edges.spelling import Operation, PerNode
from gossamer.backend.edges.structure_values import remembered
from gossamer.backend.graph.backward_part import BackwardPart, JointGraph
from gossamer.backend.graph.edge_expressions import Structure, part_sizes_from_values
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs, noticed
from gossamer.backend.graph.nodes import between, hint, in_training, is_backward
from gossamer.backend.graph.refused import Refused
from gossamer.backend.graph.size_assertions import drop_vain_assertions
from gossamer.backend.messages.message_cost import gains, missing_kernel
from gossamer.backend.messages.message_edges import MessageEdges
from gossamer.backend.messages.message_patterns import (
    EXTREMES,
    SCATTERS,
    Aggregation,
    EdgeProducts,
    Factor,
    Messages,
    aggregation_at,
    edge_products_at,
    identity,
)
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.backend.run import message_ops as ops

aten = torch.ops.aten


class MessagePassing:
    """Rewrites gather and scatter over an edge list as operations on a sparse matrix."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces message passing. Returns decisions about attention first, then about maxima, then about the others."""
        if not any(n.target in SCATTERS for n in graph.nodes):
            return []
        part_sizes_from_values(graph, context.inputs)
        structure = Structure.of(graph, context.inputs)
        extremes, others = _found(graph, structure)
        if not extremes and not any(isinstance(each, Aggregation) and each.gather for each in others):
            return []
        rewriting = _Rewriting(structure, context.inputs, context.options)
        rewriting.count(others, extremes)
        joint = JointGraph(graph) if in_training(graph) else None
        decisions = [d for node in [each.node for each in others] for d in rewriting.take_attention(node, joint)]
        graph.eliminate_dead_code()  # removes the parts of attention
        joint = JointGraph(graph) if in_training(graph) else None
        for extreme in _found(graph, structure)[0]:
            decisions += rewriting.take_extreme(extreme, joint)
        graph.eliminate_dead_code()
        decisions += [rewriting.take(each) for each in _found(graph, structure)[1]]
        graph.eliminate_dead_code()
        drop_vain_assertions(graph)
        rewriting.remember(graph)
        graph.eliminate_dead_code()
        drop_vain_assertions(graph)
        return decisions


def _found(graph: fx.Graph, structure: Structure) -> tuple[list[Aggregation], list[Messages]]:
    """Returns the maxima and minima of a graph, and all other message passing."""
    extremes, others = list[Aggregation](), list[Messages]()
    for node in graph.nodes:
        aggregation = aggregation_at(node, structure)
        found = aggregation or edge_products_at(node, structure)
        if aggregation is not None and aggregation.kind in EXTREMES:
            extremes.append(aggregation)
        elif found is not None:
            others.append(found)
    return extremes, others


Arguments = tuple[list[Any], str]
"""The arguments of an operation that define its edge list: the leaves and numbers that it is computed from, and the key."""


class _Rewriting:
    """The replacements in one graph."""

    def __init__(self, structure: Structure, inputs: Inputs, options: Options) -> None:
        self._structure, self._inputs, self._options = structure, inputs, options
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._uses: Counter[str] = Counter()
        self._sorted: set[fx.Node] = set()
        self._without_negatives: set[tuple[Any, ...]] = set()

    def count(self, found: Sequence[Messages], extremes: Sequence[Messages]) -> None:
        """Notes how many operations each edge list serves, and which lists torch would refuse if they had negative nodes."""
        self._uses.update(self._sorted_list(each) for each in found)
        for each in (*found, *extremes):
            for index, wraps in zip(each.edges, each.wraps, strict=True):
                if index is not None and not wraps:
                    self._without_negatives.add(identity(index, self._structure))

    def _sorted_list(self, found: Messages) -> str:
        """Returns a key for the edge list that has to be sorted."""
        return self._structure.cut(*found.edges, None).key

    def take(self, found: Messages) -> Decision:
        """Replaces one aggregation or edge product, if that is faster. Returns the decision."""
        aggregates = isinstance(found, Aggregation)
        decision = self._judge(found, "aggregation" if aggregates else "edge products", "rows" if aggregates else "sample")
        if decision.sparse:
            emit = Emitter(found.node, self._replaced)
            self._put(
                found.node, self._aggregate(found, emit) if isinstance(found, Aggregation) else self._products(found, emit)
            )
        return decision

    def take_attention(self, node: fx.Node, joint: JointGraph | None) -> list[Decision]:
        """Replaces the attention whose result a node is, with its gradients, if that is faster. Returns the decisions."""
        aggregation = aggregation_at(node, self._structure)
        if aggregation is None:
            return []
        try:
            edges = MessageEdges.of(aggregation, self._structure)
            found = edges and attention_at(edges.forward, edges.aggregation.message.meta["val"].shape[1:], edges, joint)
        except Refused as problem:
            return [self._decision(aggregation, "graph attention", f"softmax and sums run separately: {problem}")]
        if not edges or not found:
            return []
        of = edges.aggregation
        decision = self._judge(of, "graph attention", "edges", found.heads)
        if not decision.sparse:
            return []  # `take` decides about its parts one by one
        leaves, key = self._edge_list(*of.edges)
        replace_attention(found, Operation(ops.attend, ops.attend_backward, [*leaves, of.size], [key]), Emitter(node, {}))
        return [decision, *([replace(decision, op="graph attention backward")] if found.trains else [])]

    def take_extreme(self, found: Aggregation, joint: JointGraph | None) -> list[Decision]:
        """Replaces maxima or minima with their gradient, if that is faster. Returns the decisions."""
        of, backward, kept = _with_gradient(found, joint)
        decision = self._judge(of, f"{of.kind} aggregation", "edges")
        if not decision.sparse:
            return [decision]
        emit, features = Emitter(of.node, self._replaced), [prod(of.message.meta["val"].shape[1:])]
        x = PerNode(emit.now(of.source)).read(features, emit)
        leaves, key = self._edge_list(*of.edges)
        y = emit(ops.extreme, x, *leaves, emit.now(of.size), of.kind, key)
        self._put(of.node, PerNode(of.node).written(y, emit))
        if backward is None:
            return [replace(decision, reason=f"{decision.reason}; the gradient stays dense: {kept}") if kept else decision]
        if not backward.gradients[of.source]:
            return [decision]
        (place,) = backward.gradients[of.source]
        emit = Emitter(place, self._replaced)
        rows = PerNode(emit.now(backward.upstream)).read(features, emit)
        new = emit(ops.extreme_backward, rows, x, y, *leaves, of.kind, key)
        self._put(place, PerNode(of.source).written(new, emit))
        return [decision, replace(decision, op=f"{decision.op} backward")]

    def _judge(self, found: Messages, op: str, schedule: str, heads: int = 0) -> Decision:
        """Returns the decision whether to replace it. `heads` are those of an attention, 0 for other operations."""
        leaves, value = self._structure.cut(found.edges[1]).leaves, found.node.meta["val"]
        gain, sorted_before = gains(found, self._count(found), leaves, self._uses[self._sorted_list(found)], heads)
        reason = self._too_slow(gain, sorted_before)
        problem = None if reason else missing_kernel(value.dtype, schedule, value.device)
        decision = self._decision(found, op, reason or "message passing over an edge list", gain, None if reason else schedule)
        if problem is not None:
            if self._options.strict:
                raise problem
            warnings.warn(f"gossamer leaves message passing over {decision.name} dense: {problem}", stacklevel=2)
            return self._decision(found, op, FAILED, gain)
        if decision.sparse:
            self._sorted.update(leaves)
        return decision

    def _decision(
        self, found: Messages, op: str, reason: str, gain: float | None = None, schedule: str | None = None
    ) -> Decision:
        """Returns a decision for the report."""
        target = found.edges[1]
        name = " ".join(map(self._inputs.name, self._structure.cut(target).leaves)) or target.name
        count, (rows, columns) = self._count(found), (hint(size) or 0 for size in found.shape)
        density = min(1.0, count / max(1, rows * columns))
        op = f"{op} backward" if is_backward(found.node) else op
        sparse = schedule is not None
        return Decision(name, op, (rows, columns), density, "CSR" if sparse else None, schedule, sparse, reason, gain)

    def _count(self, found: Messages) -> int:
        """Returns the approximate number of edges."""
        target = found.edges[1]
        sizes = (hint(s) or 0 for leaf in self._structure.cut(target).leaves for s in leaf.meta["val"].shape)
        return hint(target.meta["val"].shape[0]) or max(sizes, default=0)

    def _too_slow(self, gain: float, sorted_before: float) -> str | None:
        """Returns why a gain is too small, from the gains with and without sorting; None if it is large enough."""
        least = self._options.min_gain
        if gain >= least:
            return None
        if sorted_before >= least:
            return f"the edges may change at every call, and sorting them each time leaves no gain of {least:g}x"
        return f"too small for a gain of {least:g}x"

    def _edge_list(
        self, source: fx.Node | None, target: fx.Node, weight: fx.Node | None = None, mean: bool = False
    ) -> Arguments:
        """Returns the arguments that define an edge list, with known weights if there are any."""
        expression = self._structure.cut(source, target, weight)
        ends = {"source": source, "target": target}.items()
        wrapping = (end for end, node in ends if node and identity(node, self._structure) not in self._without_negatives)
        key = ops.edge_list(expression, noticed(expression.leaves, self._options.verify), mean, " ".join(wrapping))
        return [list(expression.leaves), list(expression.numbers)], key

    def _put(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self._replaced[old] = new

    def remember(self, graph: fx.Graph) -> None:
        """Makes values that scatter only over the structure, such as degrees, be computed once for each structure.

        Values of edges that no product uses stay in the graph. If there are few edges, or they change at every call, looking
        the values up takes longer than computing them.
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
        weight, known = _product(found.factors, emit), None
        if weight is not None and self._is_known(found.factors):
            weight, known = None, weight
        x = PerNode(emit.now(found.source)).read(trail, emit)
        leaves, key = self._edge_list(*found.edges, known, found.kind == "mean")
        size = emit.sizes(found.base, (0,))[0] if found.base is not None else emit.now(found.size)
        y = emit(ops.aggregate, x, *leaves, weight, size, key)
        y = PerNode(found.node).written(_scaled(y, found.scale, emit), emit)
        return y if found.base is None else emit(aten.add.Tensor, emit.now(found.base), y)

    def _products(self, found: EdgeProducts, emit: Emitter) -> fx.Node:
        shape = found.product.meta["val"].shape
        heads, features = prod(shape[1 : found.kept]), prod(shape[found.kept :])
        left, right = (PerNode(emit.now(gather.x)).read([heads, features], emit) for gather in (found.left, found.right))
        leaves, key = self._edge_list(*found.edges)
        y = emit(ops.edge_products, left, right, *leaves, emit.sizes(found.edges[1], (0,))[0], key)
        return PerNode(found.node).written(_scaled(y, found.scale, emit), emit)

    def _is_known(self, factors: Sequence[Factor]) -> bool:
        ones = all(size == 1 for f in factors for size in f.node.meta["val"].shape[1:])
        return ones and all(f.node in self._structure for f in factors)


def _with_gradient(of: Aggregation, joint: JointGraph | None) -> tuple[Aggregation, BackwardPart | None, str]:
    """Returns an aggregation, of gathered rows or else of the messages themselves, with its gradient, and why that is
    unknown."""
    reason = ""
    for each in (of, replace(of, gather=None)):
        if joint is None:
            break
        try:
            return each, joint.part(between([each.source], of.node), [each.source], of.node), ""
        except Refused as problem:
            reason = str(problem)
    return of, None, reason


def _scaled(node: fx.Node, scale: float, emit: Emitter) -> fx.Node:
    return node if scale == 1 else emit(aten.mul.Tensor, node, scale)


def _product(factors: Sequence[Factor], emit: Emitter) -> fx.Node | None:
    """Emits the product of the weights of edges. Returns None if there are none."""
    product = None
    for factor in factors:
        node = emit.now(factor.node)
        if product is None:
            product = emit(aten.reciprocal.default, node) if factor.inverse else node
        else:
            product = emit(aten.div.Tensor if factor.inverse else aten.mul.Tensor, product, node)
    return product
