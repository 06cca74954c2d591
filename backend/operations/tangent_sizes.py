"""tangent-sizes: gradients that a joint graph is given have the sizes of the results that they belong to.

    %v: f32[6*u6] = …                      %v: f32[6*u2] = …
    %tangents_1: f32[6*u2]           →     %tangents_1: f32[6*u2]
    return (%v, …)                         return (%v, …)

AOTAutograd asks twice what a function returns. Sizes that are known at run time only get other names each time, and torch takes
two names for one by what Dynamo saw of a size. It does not see what stays inside of an operation on SparseTensors; and Inductor
would not know what u2 is where it is given 6*u2 gradients.
"""

from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.nodes import is_tangent
from gossamer.backend.report.report import Decision
from gossamer.runtime.torch_internals import (
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
    free_unbacked_symbols,
    rename_unbacked,
)


class TangentSizes:
    """Sizes of results that differ from those of their gradients in names alone get the names of these."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """No decision: nothing is made sparse here."""
        tangents = {_result_of(node.meta.get("desc")): node for node in graph.nodes if is_tangent(node)}
        output = graph.output_node()
        results: Any = output.args[0]
        for desc, result in zip(output.meta["desc"] if tangents else (), results, strict=False):
            if desc in tangents:
                for own, given in zip(_shape(result), _shape(tangents[desc]), strict=True):
                    if isinstance(own, torch.SymInt) and isinstance(given, torch.SymInt):
                        _rename(own.node, given.node)
        return []


def _result_of(desc: Any) -> Any:
    """How AOTAutograd calls the result whose gradient an input is."""
    if isinstance(desc, SubclassGetAttrAOTInput):
        return SubclassGetAttrAOTOutput(_result_of(desc.base), desc.attr)
    return desc.output if isinstance(desc, TangentAOTInput) else None


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _rename(own: Any, given: Any) -> None:
    """Has the symbols of one size be called as those of the other, in the order in which both were made."""
    ours, others = (free_unbacked_symbols(each.expr) for each in (own, given))
    names = dict(zip(_by_age(ours - others), _by_age(others - ours), strict=False))
    if names and own.expr.xreplace(names) == given.expr:
        for symbol, name in names.items():
            rename_unbacked(own.shape_env, symbol, name)


def _by_age(symbols: set[Any]) -> list[Any]:
    return sorted(symbols, key=lambda symbol: int(symbol.name[1:]))
