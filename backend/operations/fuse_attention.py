"""Fuses SDDMM, softmax and SpMM on one pattern into one operation, in the inference or the joint graph.

    %s = gossamer::sample([%pos, %crd, %a, %q, %k])               %r = gossamer::attend_edges(%pos, %crd, %v, …, %q, %k, …)
    %p = gossamer::softmax(%pos, scale * %s)                 →    %y = %r[0]
    %y = gossamer::einsum([%pos, %crd, dropout(%p), %v])
    and with them: gradients of %v, %q, %k, …                →    gossamer::attend_edges_backward(…)

`edges/attention.py` defines which expressions are attention.
"""

import torch
from torch import fx

from gossamer.backend.edges.attention import Attention, attention_at, replace
from gossamer.backend.edges.spelling import SIDES, Operation
from gossamer.backend.graph.backward_part import JointGraph
from gossamer.backend.graph.einsum_calls import Call, call_at, hint
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.nodes import in_training
from gossamer.backend.graph.refused import Refused
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.operations.sparse_edges import SparseEdges
from gossamer.backend.report.report import Decision

ours = torch.ops.gossamer


class FuseAttention:
    """Fuses SDDMM, softmax and SpMM, and their gradients, into one operation."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Fuses attention. Returns a decision for each softmax that a product follows."""
        if not any(node.target is ours.softmax.default for node in graph.nodes):
            return []
        joint = JointGraph(graph) if in_training(graph) else None
        decisions = []
        for node in graph.find_nodes(op="call_function", target=ours.einsum.default):
            call = call_at(node, ours.einsum.default)
            assert call is not None
            try:
                found = _attention(call, joint)
            except Refused as problem:
                decisions.append(_decision(call, context.inputs, f"softmax and product run separately: {problem}", None))
                continue
            if found is not None:
                decisions.append(_decision(call, context.inputs, _reason(found), "edges"))
                arrays = list(call.sparse[0].arrays[:2])
                operation = Operation(ours.attend_edges.default, ours.attend_edges_backward.default, arrays, [])
                replace(found, operation, Emitter(node, {}))
        graph.eliminate_dead_code()
        return decisions


def _attention(call: Call, joint: JointGraph | None) -> Attention | None:
    """Returns the attention whose last operation is this product. Raises Refused if it cannot be fused."""
    rows = call.sparse[0].rows if len(call.sparse) == len(call.dense) == 1 else None
    if rows is None or call.node.meta["val"].device.type != "cpu":
        return None
    edges = SparseEdges(rows)
    forward = edges.sum_of(call)
    if forward is None:
        return None
    shape = call.node.meta["val"].shape
    return attention_at(forward, shape[:1] if forward.result.across else shape[1:], edges, joint)


def _reason(found: Attention) -> str:
    kinds = ["dot products"] if "queries" in found.terms else []
    kinds += ["sums by node"] if not found.terms.keys().isdisjoint(SIDES) else []
    kinds += ["stored scores"] if "edge" in found.terms else []
    training = " and their gradients" if found.trains else ""
    return f"scores ({', '.join(kinds)}), softmax and product{training} in one pass over the rows"


def _decision(call: Call, inputs: Inputs, reason: str, schedule: str | None) -> Decision:
    """Returns the decision about an attention for the report."""
    pattern = call.sparse[0]
    assert pattern.format is not None and pattern.rows is not None
    sizes = tuple(map(hint, pattern.rows.sizes))
    name, format = name_of(pattern.rows.coordinates, inputs), pattern.format.name if schedule else None
    return Decision(name, "attention", sizes, pattern.density, format, schedule, schedule is not None, reason, None)
