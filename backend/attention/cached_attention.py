"""cached-attention: attention of a few queries, as a model generates text, reads each key of its cache once.

    %k = cat(%past_k, %new_k, 2)
    %r = view(clone(expand(unsqueeze(%k, 2), ...)))                  →    %y = gossamer::attend_cached(%q, %k, %v, %mask, ...)
    %y = scaled_dot_product(%q, %r, ..., attn_mask=%mask)

Heads that share keys and values are not repeated, and keys that the mask hides (those of a static cache that are not there yet,
or outside of a window) are not read. Without a mask, new keys and values are put behind the past ones on the way
(gossamer::attend_appended), which saves reading what was just written.
"""

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.layout import Layout, follow, merged, path, spans
from gossamer.backend.graph.names import place_of
from gossamer.backend.graph.nodes import equal, hint, in_training
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError
from gossamer.runtime.torch_internals import cpu_attention
from gossamer.sparsity.attention.cached_attention import MOST_QUERIES, attend_appended, attend_cached, cached_kernel, heads_of
from gossamer.sparsity.attention.masked_attention import LARGEST_HEAD, TYPES, attend_masked

aten = torch.ops.aten

_LEAST_KEYS = 64
"""Keys below which the call itself takes the longest, where their number does not change."""


class CachedAttention:
    """Attention of up to MOST_QUERIES queries takes the schedule `cache` in inference."""

    name: ClassVar[str] = "cached-attention"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each attention that it takes."""
        if context.options.schedule == "reference" or in_training(graph):
            return []
        called = [node for node in graph.nodes if node.target in (cpu_attention, attend_masked)]
        decisions = [_replace(node, context) for node in called if _fits(node, context)]
        if any(decision.sparse for decision in decisions):
            graph.eliminate_dead_code()
        return decisions


def few_queries(queries: Any) -> bool:
    """Whether so many queries are few, whatever the sizes of inputs are."""
    return isinstance(queries, int) and 0 < queries <= MOST_QUERIES


def few_keys(keys: Any, context: GraphContext) -> bool:
    """Whether so many keys are too few."""
    return isinstance(keys, int) and keys < _LEAST_KEYS and context.options.min_gain > 0


def _fits(node: fx.Node, context: GraphContext) -> bool:
    q, k, v = (argument.meta["val"] for argument in node.args[:3])  # type: ignore[union-attr]
    if not (q.is_cpu and q.dtype in TYPES and q.dtype == k.dtype == v.dtype and few_queries(q.shape[2])):
        return False
    size, keys = q.shape[3], k.shape[2]
    if not (isinstance(size, int) and 0 < size <= LARGEST_HEAD and size == v.shape[3] and isinstance(q.shape[1], int)):
        return False
    if few_keys(keys, context):
        return False
    plain = not (any(node.args[3:5]) if node.target is cpu_attention else node.args[6])  # dropout, is_causal; a seed
    mask = _mask_of(node)
    readable = mask is None or (mask.meta["val"].dim() in (2, 4) and mask.meta["val"].dtype in TYPES)
    return plain and readable and all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _mask_of(node: fx.Node) -> Any:
    return node.args[3] if node.target is attend_masked else node.kwargs.get("attn_mask")


def _replace(node: fx.Node, context: GraphContext) -> Decision:
    arguments: Any = node.args
    q, k, v = arguments[:3]
    values, mask = [n.meta["val"] for n in (q, k, v)], _mask_of(node)
    size = (values[0].shape[2], hint(values[1].shape[2]) or 0)
    given: Any = arguments[4:6] if node.target is attend_masked else (node.kwargs.get("scale"), None)
    scale, cap = float(given[0] or values[0].shape[3] ** -0.5), given[1]
    k, v = _shared(k), _shared(v)
    if not equal(k.meta["val"].shape[1], v.meta["val"].shape[1]):
        k, v = arguments[1:3]
    appended = [_appended(n) for n in (k, v)] if mask is None else [None]
    appends = None not in appended
    heads = heads_of(values[0], k.meta["val"], mask.meta["val"] if mask is not None else None, scale, cap)
    try:
        kernel = cached_kernel(heads, appends)
    except CompileError:
        if context.options.strict:
            raise
        return Decision(place_of(node), "attention", size, 1.0, None, None, False, FAILED, None)
    emit = Emitter(node)
    if appends:
        (past_k, new_k), (past_v, new_v) = appended  # type: ignore[misc]
        made = emit(attend_appended, q, past_k, past_v, new_k, new_v, mask, scale, cap)
        y, all_k, all_v = (emit(operator.getitem, made, n) for n in range(3))
        for joined, result in ((k, all_k), (v, all_v)):
            _instead(joined, result)
    else:
        y = emit(attend_cached, q, k, v, mask, scale, cap)
    for user in list(node.users):
        user.replace_all_uses_with(y)
    reason = f"{heads.group} heads at a time read keys and values" if heads.group > 1 else "keys and values are read once"
    reason += ", new ones are appended" if appends else ""
    reason += ", hidden ones are skipped" if mask is not None else ""
    return Decision(place_of(node), "attention", size, 1.0, "cache", "cache", True, reason, None, kernels=(kernel.key,))


def _shared(node: Any) -> fx.Node:
    """The keys or values that several heads share, each repeated for them one after the other; or those given."""
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
    """Past and new keys or values, where those given are the one behind the other."""
    arguments: Any = node.args
    if node.target is not aten.cat.default or len(arguments[0]) != 2:
        return None
    past, new = arguments[0]
    values, axis = [n.meta["val"] for n in (past, new, node)], arguments[1] if len(arguments) > 1 else 0
    same_type = values[0].dtype == values[1].dtype == values[2].dtype
    return (past, new) if axis in (2, -2) and same_type and values[0].dim() == 4 else None


def _instead(joined: fx.Node, result: fx.Node) -> None:
    """Has all that comes after attention use its result; what comes before keeps the copy."""
    order = {node: n for n, node in enumerate(joined.graph.nodes)}
    for user in list(joined.users):
        if order[user] > order[result]:
            user.replace_input_with(joined, result)
