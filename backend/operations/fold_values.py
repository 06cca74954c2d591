"""Computes values of sparse tensors that depend only on constants once, not at every call.

    %s = gossamer::sample([A, %d]);  %n = mul(%a, %s)             %n = gossamer::structure([%pos, %crd, %a, …], …)
    %y = gossamer::einsum([%pos, %crd, %n, %x])              →    %y = gossamer::einsum([%pos, %crd, %n, %x])

So D^-1/2 A D^-1/2, degrees included, takes no time as long as A is the same. Addresses and versions of its arrays tell.
"""

from math import prod

import torch
from torch import fx

from gossamer.backend.edges.structure_values import remembered
from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.einsum_calls import call_at, hint
from gossamer.backend.graph.expressions import Expression
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.report.report import Decision
from gossamer.runtime.torch_internals import SubclassGetAttrAOTInput

ours = torch.ops.gossamer


class FoldValues:
    """Replaces values that depend only on constants by remembered ones."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Folds the values. Returns a decision for each."""
        if not any(node.target in (ours.sample.default, ours.einsum.default) for node in graph.nodes):
            return []
        structure = Structure.of(graph, context.inputs)
        decisions = []
        for node in [n for n in graph.nodes if n.op == "call_function" and n in structure]:
            value = node.meta["val"]
            if all(user in structure for user in node.users) or not isinstance(value, torch.Tensor) or value.dim() != 1:
                continue
            expression = structure.cut(node)
            source = _source(expression)
            if source is None or not all(_belongs_to_sparse(leaf, context.inputs) for leaf in expression.leaves):
                continue
            new = remembered(node, expression, context.options.verify)
            if new is None:
                continue
            node.replace_all_uses_with(new)
            decisions.append(_decision(source, expression, context.inputs))
        if decisions:
            graph.eliminate_dead_code()
        return decisions


def _source(expression: Expression) -> fx.Node | None:
    """Returns the first call in an expression that makes folding worthwhile: one that goes over the entries of a sparse
    tensor."""
    targets = (ours.sample.default, ours.einsum.default)
    return next((node for node in expression.evaluate.graph.nodes if node.target in targets), None)


def _belongs_to_sparse(leaf: fx.Node, inputs: Inputs) -> bool:
    """Whether an input is an array of a SparseTensor that needs no gradient. Other inputs change from call to call."""
    desc = leaf.meta.get("desc")
    if not isinstance(desc, SubclassGetAttrAOTInput):
        return False
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    outer = inputs.given(desc)
    return outer is not None and not outer.requires_grad


def _decision(source: fx.Node, expression: Expression, inputs: Inputs) -> Decision:
    call = call_at(source, source.target)
    assert call is not None
    first = call.sparse[0]
    assert first.format is not None
    originals = dict(zip((n for n in source.graph.nodes if n.op == "placeholder"), expression.leaves, strict=False))
    shape = tuple(size if isinstance(size, int) else 0 for size in first.sizes)
    given = [originals[array] for array in reversed(first.arrays) if array in originals]
    entries = hint(given[0].meta["val"].shape[0]) if given else 0
    name = name_of(originals.get(first.arrays[0], source), inputs)
    density = min(1.0, entries / max(1, prod(shape)))
    reason = "values are computed once, and again after an array changes"
    return Decision(name, "values", shape, density, first.format.name, "folded", True, reason, None)
