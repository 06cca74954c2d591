"""SDDMM, softmax and SpMM on one pattern become one operation, in the inference or the joint graph.

    %s = gossamer::sample([%pos, %crd, %a, %q, %k])               %r = gossamer::attend_edges(%pos, %crd, %v, …, %q, %k, …)
    %p = gossamer::softmax(%pos, scale * %s)                 →    %y = %r[0]
    %y = gossamer::einsum([%pos, %crd, dropout(%p), %v])
    and with them: gradients of %v, of %p, of the softmax,   →    gossamer::attend_edges_backward(…)
    of %s and of %q, %k, …

What counts as attention is said in `edges/attention.py`.
"""

from math import prod
from typing import ClassVar

import torch
from torch import fx

from gossamer.backend.edges.attention import Attention, attention_at, replace
from gossamer.backend.edges.spelling import Operation
from gossamer.backend.graph.einsum_calls import Call, call_at, hint
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.operations.sparse_edges import SparseEdges
from gossamer.backend.report.report import Decision

ours = torch.ops.gossamer


class FuseAttention:
    """SDDMM, softmax and SpMM become one operation, with their gradients."""

    name: ClassVar[str] = "fuse-attention"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each attention."""
        decisions = []
        for node in [n for n in graph.nodes if n.target is ours.einsum.default] if _has_softmax(graph) else ():
            call = call_at(node, ours.einsum.default)
            found = None if call is None else _attention(call)
            if call is None or found is None:
                continue
            decisions.append(_decision(found, call, context.inputs))
            arrays = list(call.sparse[0].arrays[:2])
            operation = Operation(ours.attend_edges.default, ours.attend_edges_backward.default, arrays, [])
            replace(found, operation, Emitter(node, {}))
        if decisions:
            graph.eliminate_dead_code()
        return decisions


def _has_softmax(graph: fx.Graph) -> bool:
    return any(node.target is ours.softmax.default for node in graph.nodes)


def _attention(call: Call) -> Attention | None:
    """The attention that a product ends."""
    rows = call.sparse[0].rows if len(call.sparse) == len(call.dense) == 1 else None
    if rows is None or call.node.meta["val"].device.type != "cpu":
        return None
    edges = SparseEdges(rows)
    forward = edges.sum_of(call)
    if forward is None:
        return None
    shape = call.node.meta["val"].shape
    return attention_at(forward, shape[:1] if forward.result.across else shape[1:], edges)


def _decision(found: Attention, call: Call, inputs: Inputs) -> Decision:
    """What the report says about it."""
    pattern, scores = call.sparse[0], found.scores
    assert pattern.format is not None and pattern.rows is not None
    sizes = [hint(size) for size in pattern.rows.sizes]
    entries = hint(pattern.values.meta["val"].shape[0])
    kinds = ["dot products"] if scores.product is not None else []
    kinds += ["sums by node"] if any(scores.nodes.values()) else []
    kinds += ["stored scores"] if scores.stored else []
    training = " and their gradients" if found.gradients else ""
    reason = f"scores ({', '.join(kinds)}), softmax and product{training} in one pass over the rows"
    density = min(1.0, entries / max(1, prod(sizes)))
    name = name_of(pattern.rows.coordinates, inputs)
    return Decision(name, "attention", tuple(sizes), density, pattern.format.name, "edges", True, reason, None)
