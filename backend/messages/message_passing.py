"""Message passing over edge lists becomes products with a sparse matrix: SpMM forward, SpMM with the transpose backward, and
SDDMM for the gradients of weights.

    %s = index_select(%h, 0, select(%edge_index, 0, 0))
    %m = mul(view(%norm, [-1, 1]), %s)                       →   gossamer::aggregate(%h, [%edge_index], [], None, n, "3f2a…")
    %y = scatter_add(zeros, 0, expand(…, %edge_index), %m)

All that depends on the structure alone (self loops, degrees, normalised weights) goes with it, and is computed once for an
edge list, not at every call.
"""

import operator
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.calls import message_ops as ops
from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.edge_expressions import Structure, part_sizes_from_values
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.size_assertions import drop_vain_assertions
from gossamer.backend.messages.message_attention import EdgeAttention, attentions
from gossamer.backend.messages.message_extremes import Extreme, extremes
from gossamer.backend.messages.message_patterns import (
    SCATTERS,
    Aggregation,
    EdgeProducts,
    Factor,
    aggregation_at,
    edge_products_at,
)
from gossamer.backend.regions.contractions import is_backward
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError
from gossamer.sparsity.edges.edge_attention import SEEDS, attend_edges
from gossamer.sparsity.edges.sorted_edges import SortedEdges

aten = torch.ops.aten

_GAIN = 3.0
"""Elements of gathered rows that a product takes in the time in which gather and scatter move one."""


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
        if not any(a.gather for a in aggregations) and not any(extremes(graph, aggregations, structure)):
            return []
        rewriting = _Rewriting(structure, context.inputs, context.options)
        decisions = [d for a in list(attentions(aggregations, structure)) for d in rewriting.take_attention(a)]
        graph.eliminate_dead_code()  # what attention was made of
        for each in list(extremes(graph, _aggregations(graph, structure), structure)):
            decisions += rewriting.take_extreme(each)
        graph.eliminate_dead_code()
        products = [p for n in graph.nodes if (p := edge_products_at(n, structure)) is not None]
        place = {node: number for number, node in enumerate(graph.nodes)}
        found: list[Aggregation | EdgeProducts] = [*_aggregations(graph, structure), *products]
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


class _Rewriting:
    """The replacements in one graph."""

    def __init__(self, structure: Structure, inputs: Inputs, options: Options) -> None:
        self._structure, self._inputs, self._options = structure, inputs, options
        self._replaced: dict[fx.Node, fx.Node] = {}

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

    def take_attention(self, found: EdgeAttention) -> list[Decision]:
        """Replaces one attention with its gradients, if that pays."""
        decisions = [self._judge(found.aggregation, "graph attention", "edges")]
        if not decisions[0].sparse:
            return []  # its parts are judged one by one
        gather, scores = found.aggregation.gather, found.scores
        assert gather is not None
        emit = Emitter(found.aggregation.node, self._replaced)
        terms = self._terms(found, emit)
        features, heads = terms["values"].meta["val"].shape[2], terms["values"].meta["val"].shape[1]
        expression = self._structure.cut(gather.index, found.aggregation.target, None)
        key = ops.edge_list(expression, self._options.verify)
        place = terms["values"].meta["val"].device
        seed = emit(aten.randint.low, *SEEDS, [1], device=place) if found.dropout else None
        given = [terms.get(name) for name in ops.ATTENDED]
        leaves, targets = [list(expression.leaves), list(expression.numbers)], emit.now(found.aggregation.size)
        arguments = [*given, seed, *leaves, targets, scores.scale, scores.slope, found.dropout]
        both = emit(ops.attend, *arguments, key)
        out, statistics = (emit(operator.getitem, both, n) for n in range(2))
        self._put(found.aggregation.node, self._like(out, found.aggregation.node, emit))
        if found.gradient is None:
            return decisions
        emit = Emitter(min(found.gradients.values()), self._replaced)
        gradient = self._rows(found.gradient, [heads, features], emit)
        needs = [name in found.gradients for name in ops.ATTENDED]
        parts = emit(ops.attend_backward, gradient, out, statistics, *arguments, needs, key)
        for number, name in enumerate(name for name in ops.ATTENDED if name in found.gradients):
            old, new = found.gradients[name], emit(operator.getitem, parts, number)
            if name == "direction":
                new = emit(aten.reshape.default, new, list(old.meta["val"].shape))
            self._put(old, self._like(new, old, emit))
        return [*decisions, replace(decisions[0], op="graph attention backward")]

    def _terms(self, found: EdgeAttention, emit: Emitter) -> dict[str, fx.Node]:
        """The terms of the operation by name."""
        gather, scores = found.aggregation.gather, found.scores
        assert gather is not None
        value = found.aggregation.message.meta["val"]
        heads = value.shape[1] if value.dim() == 3 else 1
        terms = {"values": self._rows(gather.x, [heads, value.shape[-1]], emit)}
        for name, each in (("source", scores.source), ("target", scores.target)):
            if each is not None:
                terms[name] = self._rows(each.x, [heads], emit)
        for name, each in (("keys", scores.keys), ("queries", scores.queries)):
            if each is not None:
                terms[name] = self._rows(each.x, [heads, scores.size], emit)
        if scores.direction is not None:
            terms["direction"] = emit(aten.reshape.default, emit.now(scores.direction), [heads, scores.size])
        if scores.edge is not None:
            first, *others = map(emit.now, scores.edge)
            for other in others:
                first = emit(aten.add.Tensor, first, other)
            terms["edge"] = self._rows(first, [heads], emit)
        return terms

    def take_extreme(self, found: Extreme) -> list[Decision]:
        """Replaces maxima or minima with their gradient, if that pays."""
        of = found.aggregation
        decision = self._judge(of, f"{found.kind} aggregation", "edges")
        if not decision.sparse:
            return [decision]
        emit = Emitter(of.node, self._replaced)
        x = self._rows(of.gather.x if of.gather else of.message, [found.features], emit)
        expression = self._structure.cut(of.gather.index if of.gather else None, of.target, None)
        leaves, key = [list(expression.leaves), list(expression.numbers)], ops.edge_list(expression, self._options.verify)
        y = emit(ops.extreme, x, *leaves, emit.now(of.size), found.kind, key)
        gradient, of_x = found.gradient, found.of_x
        if gradient is not None and of_x is not None:
            emit_backward = Emitter(of_x, self._replaced)
            rows = self._rows(gradient, [found.features], emit_backward)
            new = emit_backward(ops.extreme_backward, rows, x, y, *leaves, found.kind, key)
            self._put(of_x, self._like(new, of_x, emit_backward))
        self._put(of.node, self._like(y, of.node, emit))
        return [decision, *([replace(decision, op=f"{decision.op} backward")] if of_x is not None else [])]

    def _judge(self, found: Aggregation | EdgeProducts, op: str, schedule: str) -> Decision:
        index = found.target if isinstance(found, Aggregation) else found.left.index
        assert index is not None
        leaves = self._structure.cut(index).leaves
        name = " ".join(self._inputs.name(leaf) for leaf in leaves) or index.name
        edges = _edges(index, leaves)
        moved = edges * _features(found)
        value = found.node.meta["val"]
        gain = moved / (moved / _GAIN + device_of(value.device).edge_call)
        reason = f"too small for a gain of {self._options.min_gain:g}x" if gain < self._options.min_gain else None
        problem = None if reason else _missing_kernel(value.dtype, schedule, value.device)
        if problem is not None:
            if self._options.strict:
                raise problem
            warnings.warn(f"gossamer leaves message passing over {name} dense: {problem}", stacklevel=2)
            reason = FAILED
        op = f"{op} backward" if is_backward(found.node) else op
        shape, density = _shape(found, edges)
        if reason is not None:
            return Decision(name, op, shape, density, None, None, False, reason, gain)
        return Decision(name, op, shape, density, "CSR", schedule, True, "message passing over an edge list", gain)

    def _put(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self._replaced[old] = new

    def _like(self, node: fx.Node, old: fx.Node, emit: Emitter) -> fx.Node:
        """The node with the sizes of the one it takes the place of, which has the same rows."""
        whole, own = old.meta["val"].shape, node.meta["val"].shape
        if len(whole) == len(own) and all(p is q or p == q for p, q in zip(whole[1:], own[1:], strict=True)):
            return node
        return emit(aten.reshape.default, node, [*emit.sizes(node, (0,)), *whole[1:]])

    def remember(self, graph: fx.Graph) -> None:
        """Makes values that scatter over the structure alone, such as degrees, be computed when it is new."""
        for node in [n for n in graph.nodes if n.op == "call_function" and n in self._structure]:
            value = node.meta["val"]
            ends = isinstance(value, torch.Tensor) and any(user not in self._structure for user in node.users)
            if not ends or not value.is_floating_point() or not all(_known_size(s) for s in value.shape):
                continue
            expression = self._structure.cut(node)
            if not any(n.target in SCATTERS for n in expression.evaluate.graph.nodes) or not expression.leaves:
                continue
            emit = Emitter(node, self._replaced)
            key = ops.structure_value(expression, self._options.verify, value.dtype)
            sizes = emit.sizes(node, tuple(range(value.dim())))
            if any(isinstance(size, fx.Node) for size in sizes):
                continue  # asking for the size would need the value
            new = emit(ops.structure, list(expression.leaves), list(expression.numbers), sizes, key)
            for user in [user for user in node.users if user not in self._structure]:
                user.replace_input_with(node, new)

    def _aggregate(self, found: Aggregation, emit: Emitter) -> fx.Node:
        trail = list(found.message.meta["val"].shape[1:])
        rows, weight, known = found.message, None, None
        if found.gather is not None:
            rows = found.gather.x
            weight = _product(found.factors, emit)
            if weight is not None and self._is_known(found.factors):
                weight, known = None, weight
        x = self._rows(rows, trail, emit)
        expression = self._structure.cut(found.gather.index if found.gather else None, found.target, known)
        key = ops.edge_list(expression, self._options.verify, found.mean)
        y = emit(ops.aggregate, x, list(expression.leaves), list(expression.numbers), weight, emit.now(found.size)
                 if found.size is not None else emit.sizes(found.base, (0,))[0], key)  # type: ignore[arg-type]  # fmt: skip
        y = self._like(y, found.node, emit)
        return y if found.base is None else emit(aten.add.Tensor, emit.now(found.base), y)

    def _products(self, found: EdgeProducts, emit: Emitter) -> fx.Node:
        value = found.product.meta["val"]
        heads, features = prod(value.shape[1 : found.kept]), prod(value.shape[found.kept :])
        left, right = (self._rows(gather.x, [heads, features], emit) for gather in (found.left, found.right))
        expression = self._structure.cut(found.right.index, found.left.index, None)
        assert found.left.index is not None
        edges = emit.sizes(found.left.index, (0,))[0]
        leaves, key = [list(expression.leaves), list(expression.numbers)], ops.edge_list(expression, self._options.verify)
        y = emit(ops.edge_products, left, right, *leaves, edges, key)
        return self._like(y, found.node, emit)

    def _rows(self, x: fx.Node, trail: Sequence[Any], emit: Emitter) -> fx.Node:
        """x as [nodes, *trail]."""
        now = emit.now(x)
        shape = now.meta["val"].shape
        if len(shape) == len(trail) + 1 and all(p is q or p == q for p, q in zip(shape[1:], trail, strict=True)):
            return now
        return emit(aten.reshape.default, now, [*emit.sizes(x, (0,)), *trail])

    def _is_known(self, factors: Sequence[Factor]) -> bool:
        ones = all(size == 1 for f in factors for size in f.node.meta["val"].shape[1:])
        return ones and all(f.node in self._structure for f in factors)


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


def _edges(index: fx.Node, leaves: Sequence[fx.Node]) -> int:
    """About how many edges there are."""
    size = _hint(index.meta["val"].shape[0])
    return size or max((_hint(s) or 0 for leaf in leaves for s in leaf.meta["val"].shape), default=0)


def _features(found: Aggregation | EdgeProducts) -> int:
    rows = found.message if isinstance(found, Aggregation) else found.product
    return prod(_hint(size) or 1 for size in rows.meta["val"].shape[1:])


def _shape(found: Aggregation | EdgeProducts, edges: int) -> tuple[tuple[int, ...], float]:
    """The sizes of the matrix, and the share of its elements that are stored."""
    if isinstance(found, Aggregation):
        columns = _hint(found.gather.x.meta["val"].shape[0]) if found.gather else edges
        rows = _hint(found.node.meta["val"].shape[0])
    else:
        rows, columns = (_hint(gather.x.meta["val"].shape[0]) for gather in (found.left, found.right))
    shape = rows or 0, columns or 0
    return shape, min(1.0, edges / max(1, prod(shape)))


def _hint(size: Any) -> int | None:
    return size if isinstance(size, int) else size.node.hint


def _known_size(size: Any) -> bool:
    return isinstance(size, int) or size.node.hint is not None


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
