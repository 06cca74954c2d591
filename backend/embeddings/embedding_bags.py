"""Replaces embedding bags, and sums of rows of embeddings, by one call of a kernel for as many tables as possible.

    %a = _embedding_bag(%table_1, %i, %offsets)           %s = gossamer::sum_bags([%table_1, %table_2], [%i, %j], ...)
    %b = sum(embedding(%table_2, %j), [1])            →   %a, %b = %s[0], %s[1]
    %g = _embedding_bag_backward(%d, %i, ...)             %g = gossamer::bags_gradient([%d, ...], [%i, ...], ...)[0]

The gradients of these tables are dense. Tables with `sparse=True` are looked up beside the graph (see sparse_tables.py).
bag_calls.py recognises the bags.
"""

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from gossamer.backend.embeddings.bag_calls import (
    Bags,
    bags_of,
    gradient_of,
    gradient_of_bags,
    parts,
    table_gradients,
)
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static
from gossamer.backend.graph.nodes import ancestors, arguments, hint, in_training, same
from gossamer.backend.measuring.bag_times import CLEAR, BagsOfTables
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError
from gossamer.runtime.torch_internals import OpOverload
from gossamer.sparsity.bags import gradients as _gradients  # noqa: F401  # defines the operations
from gossamer.sparsity.bags.bag_lists import index_type
from gossamer.sparsity.bags.sum_bags import kernel_of

aten = torch.ops.aten

_LEAST = 1 << 15
"""Least bytes of rows that one table's bags must read. For fewer, our call is slower than torch's."""


class EmbeddingBags:
    """Replaces all bags of a graph, and the gradients of their tables, by few calls of our kernel."""

    name: ClassVar[str] = "embedding-bags"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Replaces the bags. Returns a decision for each use of a table."""
        training, decisions, gradients = in_training(graph), list[Decision](), list[Bags]()
        statics = context.inputs.match(graph)
        least = _LEAST if context.options.min_gain > 0 else 0
        found = [bags for node in graph.nodes if (bags := bags_of(node)) is not None]
        if training:
            gradients += [bags for node in graph.nodes if (bags := gradient_of(node)) is not None and bags.bytes >= least]
        backward = {bags.node: each for bags in found if (each := table_gradients(bags)) is not None}
        for group in _at_the_first(graph, [bags for bags in found if bags.node in backward]):
            close = not training and least > 0 and (len(group) > 1 or group[0].bytes >= least)
            ratio = _measured(group, statics, context) if close else None
            reason = _reason_against(group, training, least, ratio)
            decisions += [_decision(bags, group, reason, context, ratio) for bags in group]
            if reason is not None:
                continue
            of_tables = [gradient_of_bags(node, bags) for bags in group for node in backward[bags.node][0]]
            for bags in group:
                for node in backward[bags.node][1]:
                    _compute_bags_of_entries(node, bags)
            if group[0].kind == "max" and of_tables:
                _replace_maxima(group[0], of_tables)
            else:
                _replace(group)
                gradients += of_tables
        for group in _at_the_last(graph, gradients):
            _replace_gradients(group)
        if decisions or gradients:
            graph.eliminate_dead_code()
        return decisions


def _at_the_first(graph: fx.Graph, found: Sequence[Bags]) -> list[list[Bags]]:
    """Returns the bags in groups that one call can compute. Moves the nodes that compute their operands before the group's
    first.
    """
    groups, open_ = list[list[Bags]](), dict[object, list[Bags]]()
    for bags in found:
        group = open_.get(bags.alike)
        if group is None or _is_single(group[0]) or _is_single(bags) or not _hoisted(graph, bags, group):
            group = open_[bags.alike] = []
            groups.append(group)
        group.append(bags)
    return groups


def _is_single(bags: Bags) -> bool:
    """Whether the bags are maxima with a gradient. These need a call with more results."""
    return bags.kind == "max" and any(number and part.users for number, part in parts(bags.node).items())


def _hoisted(graph: fx.Graph, bags: Bags, group: Sequence[Bags]) -> bool:
    """Moves the nodes that compute the operands of bags before the first of a group.

    Returns False, and moves nothing, if they depend on the group or have side effects.
    """
    first, members = group[0].node, {each.node for each in group}
    order = {node: n for n, node in enumerate(graph.nodes)}
    later = [node for node in ancestors(bags.operands, lambda node: order[node] < order[first]) if order[node] >= order[first]]
    if any(node in members or not _is_function(node) for node in later):
        return False
    for node in later:
        first.prepend(node)
    return True


def _is_function(node: fx.Node) -> bool:
    """Whether a node computes the same at any place in the graph."""
    target = node.target
    if isinstance(target, OpOverload):
        return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    return node.op == "call_function" and getattr(target, "__module__", "") in ("_operator", "math", "torch")


def _at_the_last(graph: fx.Graph, found: Sequence[Bags]) -> list[list[Bags]]:
    """Returns the gradients in groups that one call can compute: no node reads one before the last of its group."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    groups, open_ = list[list[Bags]](), dict[object, list[Bags]]()
    for bags in sorted(found, key=lambda each: order[each.node]):
        group = open_.get(bags.alike)
        read = [order[user] for each in group or () for user in each.node.users]
        if group is None or min(read, default=order[bags.node]) < order[bags.node]:
            group = open_[bags.alike] = []
            groups.append(group)
        group.append(bags)
    return groups


def _measured(group: Sequence[Bags], statics: Mapping[fx.Node, Static], context: GraphContext) -> float | None:
    """Returns our call's time divided by torch's for bags without gradients; None if it cannot or may not be measured."""
    budget, first = context.measuring, group[0]
    tables = [statics[table].tensor.detach() for bags in group if (table := same(bags.table)) in statics]
    known = [(bags, entries) for each in group if (bags := _bags(each)) and (entries := _entries(each))]
    torch_has_it = first.scale is None and (first.weights is None or first.kind == "sum")
    if context.exported or not torch_has_it or not len(known) == len(tables) == len(group):
        return None
    if budget is None or not budget.allows():
        return None
    counts, indices = [bags for bags, _ in known], [entries for _, entries in known]
    case = BagsOfTables(tables, counts, indices, first.kind, first.indices.meta["val"].dtype, first.weights is not None)
    try:
        with budget.spend():
            return case.ratio()
    except CompileError:
        return None


def _entries(bags: Bags) -> int:
    """Returns the number of indices; 0 if it is unknown."""
    return prod(hint(size) or 0 for size in bags.indices.meta["val"].shape)


def _bags(bags: Bags) -> int:
    """Returns the number of bags; about 0 if it is unknown."""
    count = hint((bags.indices if bags.offsets is None else bags.offsets).meta["val"].shape[0]) or 0
    return count - (bags.offsets is not None and bags.last)


def _reason_against(group: Sequence[Bags], training: bool, least: int, ratio: float | None) -> str | None:
    """Returns why the bags stay with torch; None if our call takes them, whose kernel is then compiled.

    `ratio` is our call's time divided by torch's, as measured without gradients.
    """
    bags = group[0]
    if bags.scale is None and len(group) == 1 and bags.bytes < least:
        return f"it reads {bags.bytes / 1024:.3g} KB of rows: a call takes longer than that"
    if bags.scale is None and least > 0 and not training:
        if ratio is None:
            return "without gradients, memory bounds torch's own kernel as well as ours"
        if ratio > CLEAR:
            return "without gradients, torch's own kernel was measured to be as fast"
    given = bags.table, bags.scale, bags.indices, bags.weights
    types = [None if each is None else each.meta["val"].dtype for each in given]
    try:
        kernel_of(bags.kind, *types, bags.columns, types[0] if bags.scale is None else torch.float32)
    except CompileError as error:
        return f"{FAILED}: {error}"
    return None


def _decision(bags: Bags, group: Sequence[Bags], reason: str | None, context: GraphContext, ratio: float | None) -> Decision:
    table = same(bags.table)
    name = context.inputs.name(table) if table.op == "placeholder" else table.name
    shape = hint(bags.rows) or 0, bags.columns
    op = f"embedding bag, {bags.kind}" if bags.offsets is not None else "sum of embeddings"
    gain, measured = None if ratio is None else 1 / ratio, ratio is not None
    if reason is not None:
        return Decision.dense(name, op, shape, 1.0, reason, gain, measured)
    alone = "rows are fetched ahead" if bags.scale is None else "stored rows"
    how = f"one of {len(group)} in a call" if len(group) > 1 else alone
    return Decision(name, op, shape, 1.0, "rows", "sum-bags", True, how, gain, measured)


def _replace(group: Sequence[Bags]) -> None:
    """Replaces a group by one call in the place of its first node. `_hoisted` has moved all operands before it."""
    emit = Emitter(group[0].node)
    scales = [bags.scale for bags in group if bags.scale is not None]
    operands = _operands(emit, group, [bags.table for bags in group])
    call = emit(torch.ops.gossamer.sum_bags.default, *operands, scales, [bags.columns for bags in group])
    for number, bags in enumerate(group):
        result = emit(operator.getitem, call, number)
        if bags.divisor is not None:
            result = emit(aten.div.Scalar, result, bags.divisor)
        if bags.keepdim:
            result = emit(aten.unsqueeze.default, result, 1)
        _take_place(bags, result)


def _replace_maxima(bags: Bags, gradients: Sequence[Bags]) -> None:
    """Replaces maxima and their gradients. The call also returns the row of each maximum, for the gradients."""
    emit = Emitter(bags.node)
    call = emit(torch.ops.gossamer.max_bags.default, bags.table, bags.indices, bags.offsets, bags.padding, bags.last)
    result, places = (emit(operator.getitem, call, number) for number in range(2))
    _take_place(bags, result)
    for each in gradients:
        emit = Emitter(each.node)
        made = emit(torch.ops.gossamer.max_bags_gradient.default, each.table, places, each.rows)
        each.node.replace_all_uses_with(made)


def _take_place(bags: Bags, result: fx.Node) -> None:
    old = bags.node if isinstance(bags.node.meta["val"], Tensor) else parts(bags.node).get(0)
    if old is not None:
        old.replace_all_uses_with(result)


def _replace_gradients(group: Sequence[Bags]) -> None:
    """Replaces a group of gradients by one call in the place of its last node."""
    emit = Emitter(group[-1].node)
    grads = [_per_bag(emit, bags) for bags in group]
    call = emit(torch.ops.gossamer.bags_gradient.default, *_operands(emit, group, grads), [bags.rows for bags in group])
    for number, bags in enumerate(group):
        bags.node.replace_all_uses_with(emit(operator.getitem, call, number))


def _operands(emit: Emitter, group: Sequence[Bags], values: Sequence[fx.Node]) -> list[Any]:
    """Returns the arguments of operations on many tables; see ManyBags."""
    first, weights = group[0], [_per_entry(emit, bags) for bags in group]
    indices, offsets, padding = zip(*((bags.indices, bags.offsets, bags.padding) for bags in group), strict=True)
    return [list(values), [*indices], [*offsets], weights, [*padding], first.kind, first.last]


def _per_entry(emit: Emitter, bags: Bags) -> fx.Node | None:
    """Returns the weights of bags in the shape of the indices."""
    weights = bags.weights
    if weights is None or weights.meta["val"].dim() == bags.indices.meta["val"].dim():
        return weights
    return _without(emit, weights, -1)


def _per_bag(emit: Emitter, bags: Bags) -> fx.Node:
    """Returns the gradient of the sums of bags, [bags, columns]."""
    grad = bags.table if bags.table.meta["val"].dim() == 2 else _without(emit, bags.table, 1)
    return grad if bags.divisor is None else emit(aten.div.Scalar, grad, bags.divisor)


def _without(emit: Emitter, node: fx.Node, dim: int) -> fx.Node:
    """Returns a value without a dimension of size 1."""
    if node.target is aten.unsqueeze.default and node.args[1] in (dim, dim + 3 if dim < 0 else dim - 3):
        return arguments(node)[0]
    made: fx.Node = emit(aten.squeeze.dim, node, dim)
    return made


def _compute_bags_of_entries(node: fx.Node, bags: Bags) -> None:
    """Gives the gradient of weights the bag of each entry. Torch's forward pass computed these; our call does not."""
    emit = Emitter(node)
    grad, table, indices, offsets, _, *rest = arguments(node)
    begins = emit(aten.slice.Tensor, offsets, 0, 0, -1) if bags.last else offsets
    (count,) = emit.sizes(indices, (0,))
    entries = emit(aten.arange.start_step, 0, count, 1, dtype=torch.int64, device=torch.device("cpu"))
    behind = emit(aten.bucketize.Tensor, entries, begins, right=True)
    own = emit(aten.sub.Tensor, behind, 1)
    wide = index_type(indices.meta["val"], offsets.meta["val"])
    if wide is not torch.int64:
        own = emit(torch.ops.prims.convert_element_type.default, own, wide)
    made = emit(node.target, grad, table, indices, begins, own, *rest)
    node.replace_all_uses_with(made)
