"""cached-attention: has attention of a few queries, as in text generation, read each key of its cache only once.

    %k = cat(%past_k, %new_k, 2)
    %r = view(clone(expand(unsqueeze(%k, 2), ...)))                  →    %y = gossamer::attend_cached(%q, %k, %v, %mask, ...)
    %y = scaled_dot_product(%q, %r, ..., attn_mask=%mask)

Keys and values that several heads share are not repeated. Keys that the mask hides are not read, such as unused slots of a
static cache, or keys outside a window. Without a mask, the kernel also appends new keys and
values to the past ones (gossamer::attend_appended). So it need not read again what was just written.
"""

import operator
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.attention_calls import AttentionCall, calls
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.layout import Layout, follow, merged, path, spans
from gossamer.backend.graph.names import place_of
from gossamer.backend.graph.nodes import equal, hint, in_training
from gossamer.backend.report.report import Decision
from gossamer.dialects.errors import CompileError
from gossamer.sparsity.attention.cached_attention import MOST_QUERIES, attend_appended, attend_cached, cached_kernel, heads_of
from gossamer.sparsity.attention.masked_attention import LARGEST_HEAD, TYPES

aten = torch.ops.aten

_LEAST_KEYS = 64
"""The fewest keys, if their number is fixed. With fewer, most of the time would go into the call."""


class CachedAttention:
    """Gives attention of up to MOST_QUERIES queries the schedule `cache`, in inference."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each attention of a few queries."""
        if context.options.schedule == "reference" or in_training(graph):
            return []
        decisions = [_replace(call, context) for call in calls(graph) if _fits(call, context)]
        if any(decision.sparse for decision in decisions):
            graph.eliminate_dead_code()
        return decisions


def few_queries(queries: Any) -> bool:
    """Whether a number of queries is fixed and at most MOST_QUERIES."""
    return isinstance(queries, int) and 0 < queries <= MOST_QUERIES


def few_keys(keys: Any, context: GraphContext) -> bool:
    """Whether a number of keys is fixed and too small for the kernel to gain."""
    return isinstance(keys, int) and keys < _LEAST_KEYS and context.options.min_gain > 0


def _fits(call: AttentionCall, context: GraphContext) -> bool:
    q, k, v = call.values
    if not (q.is_cpu and q.dtype in TYPES and q.dtype == k.dtype == v.dtype and few_queries(q.shape[2])):
        return False
    size, keys = q.shape[3], k.shape[2]
    if not (isinstance(size, int) and 0 < size <= LARGEST_HEAD and size == v.shape[3] and isinstance(q.shape[1], int)):
        return False
    if few_keys(keys, context) or call.dropout or call.seed is not None or call.causal:
        return False
    mask = call.mask.meta["val"] if call.mask is not None else None
    readable = mask is None or (mask.dim() in (2, 4) and mask.dtype in TYPES)
    return readable and all(user.target is operator.getitem and user.args[1] == 0 for user in call.node.users)


def _replace(call: AttentionCall, context: GraphContext) -> Decision:
    node, mask, values, (q, k, v) = call.node, call.mask, call.values, call.operands
    size = (values[0].shape[2], hint(values[1].shape[2]) or 0)
    shared = [_shared(each) for each in (k, v)]
    if equal(*(each.meta["val"].shape[1] for each in shared)):
        k, v = shared
    appended = [_appended(each) for each in (k, v)] if mask is None else []
    parts = [part for pair in appended if pair is not None for part in pair]
    appends = len(parts) == 4
    heads = heads_of(values[0], k.meta["val"], mask.meta["val"] if mask is not None else None, call.scale, call.cap)
    try:
        kernel = cached_kernel(heads, appends)
    except CompileError as problem:
        return Decision.dense(place_of(node), "attention", size, 1.0, context.reason(problem))
    emit = Emitter(node)
    if appends:
        past_k, new_k, past_v, new_v = parts
        made = emit(attend_appended, q, past_k, past_v, new_k, new_v, mask, call.scale, call.cap)
        y, all_k, all_v = (emit(operator.getitem, made, n) for n in range(3))
        for joined, result in ((k, all_k), (v, all_v)):
            _instead(joined, result)
    else:
        y = emit(attend_cached, q, k, v, mask, call.scale, call.cap)
    for user in list(node.users):
        user.replace_all_uses_with(y)
    reason = f"{heads.group} heads at a time read keys and values" if heads.group > 1 else "keys and values are read once"
    reason += ", new ones are appended" if appends else ""
    reason += ", hidden ones are skipped" if mask is not None else ""
    return Decision(place_of(node), "attention", size, 1.0, "cache", "cache", True, reason, None, kernels=(kernel.key,))


def _shared(node: Any) -> fx.Node:
    """Returns the keys or values before they were repeated for heads that share them; `node` if they were not."""
    nodes, (batch, _, tokens, size) = path(node), node.meta["val"].shape
    for number, source in enumerate(nodes[:-1]):
        shape = source.meta["val"].shape
        layout = follow(Layout.contiguous(tuple(shape)), nodes[number + 1 :])
        if layout is None or len(shape) != 4 or len(layout.dims) != 4:
            continue
        by_batch, by_head, by_token, inside = (merged(dim) for dim in layout.dims)
        by_head = by_head[:-1] if by_head and equal(by_head[-1].stride, 0) else by_head
        whole = equal(layout.offset, 0) and spans(by_batch, batch, shape[1] * tokens * size)
        if whole and spans(by_head, shape[1], tokens * size) and spans(by_token, tokens, size) and spans(inside, size, 1):
            return source
    found: fx.Node = node
    return found


def _appended(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns past and new keys or values, if `node` concatenates them; otherwise None."""
    arguments: Any = node.args
    if node.target is not aten.cat.default or len(arguments[0]) != 2:
        return None
    past, new = arguments[0]
    values, axis = [n.meta["val"] for n in (past, new, node)], arguments[1] if len(arguments) > 1 else 0
    same_type = values[0].dtype == values[1].dtype == values[2].dtype
    return (past, new) if axis in (2, -2) and same_type and values[0].dim() == 4 else None


def _instead(joined: fx.Node, result: fx.Node) -> None:
    """Replaces `joined` by `result` in all users behind it. Users before it keep the concatenation."""
    order = {node: n for n, node in enumerate(joined.graph.nodes)}
    for user in list(joined.users):
        if order[user] > order[result]:
            user.replace_input_with(joined, result)
