"""Values of sparse tensors that depend on constants alone are computed when those are new, not at every call.

    %s = gossamer::sample([A, %d]);  %n = mul(%a, %s)             %n = gossamer::structure([%pos, %crd, %a, …], …)
    %y = gossamer::einsum([%pos, %crd, %n, %x])              →    %y = gossamer::einsum([%pos, %crd, %n, %x])

So D^-1/2 A D^-1/2 costs nothing, degrees included, as long as A is the same: its arrays are compared by memory and version.
"""

from math import prod
from typing import ClassVar

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gossamer.backend.calls import message_ops
from gossamer.backend.graph.edge_expressions import Structure
from gossamer.backend.graph.einsum_calls import call_at, hint
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import Expression
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.operations.report_operations import name_of
from gossamer.backend.report.report import Decision

ours = torch.ops.gossamer


class FoldValues:
    """What depends on constants alone is computed once."""

    name: ClassVar[str] = "fold-values"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each that is folded."""
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
            size = _size(value.shape[0], expression)
            if (
                source is None
                or size is None
                or not all(_belongs_to_sparse(leaf, context.inputs) for leaf in expression.leaves)
            ):
                continue
            emit = Emitter(node, {})
            key = message_ops.structure_value(expression, context.options.verify, value.dtype)
            sizes = [size] if isinstance(size, int) else emit.sizes(size, (0,))
            leaves = list(expression.leaves), list(expression.numbers)
            node.replace_all_uses_with(emit(message_ops.structure, *leaves, sizes, key))
            decisions.append(_decision(source, expression, context.inputs))
        if decisions:
            graph.eliminate_dead_code()
        return decisions


def _source(expression: Expression) -> fx.Node | None:
    """The first call in it that is worth it: one that goes over the entries of a sparse tensor."""
    targets = (ours.sample.default, ours.einsum.default)
    return next((node for node in expression.evaluate.graph.nodes if node.target in targets), None)


def _size(wanted: object, expression: Expression) -> int | fx.Node | None:
    """A size: as a number, or a leaf that has it."""
    if isinstance(wanted, int):
        return wanted
    shapes = ((leaf, leaf.meta["val"].shape) for leaf in expression.leaves)
    return next((leaf for leaf, shape in shapes if len(shape) == 1 and statically_known_true(shape[0] == wanted)), None)


def _belongs_to_sparse(leaf: fx.Node, inputs: Inputs) -> bool:
    """Whether this is an array of a SparseTensor that needs no gradient: others change from call to call."""
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
    entries = hint(originals[first.arrays[1]].meta["val"].shape[0]) if first.arrays[1] in originals else 0
    name = name_of(originals.get(first.arrays[0], source), inputs)
    density = min(1.0, entries / max(1, prod(shape)))
    reason = "values computed once, until an array of it changes"
    return Decision(name, "values", shape, density, first.format.name, "folded", True, reason, None)
