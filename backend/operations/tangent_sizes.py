"""tangent-sizes: gives results of a joint graph and their incoming gradients (tangents) the same names of sizes.

    %v: f32[6*u6] = …                      %v: f32[6*u2] = …
    %tangents_1: f32[6*u2]           →     %tangents_1: f32[6*u2]
    return (%v, …)                         return (%v, …)

AOTAutograd traces a function twice to find out what it returns. Sizes that are known only at run time get new names each time.
Torch unifies the names of sizes that Dynamo saw, but Dynamo does not see sizes inside of an operation on SparseTensors. Without
this pass, Inductor could not compute u2 from an input with 6*u2 gradients.
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
    """Renames sizes of results as those of their gradients, if they differ only in names."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns no decisions, because this pass makes nothing sparse."""
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
    """Returns AOTAutograd's description of the result whose gradient an input is, None for other inputs."""
    if isinstance(desc, SubclassGetAttrAOTInput):
        return SubclassGetAttrAOTOutput(_result_of(desc.base), desc.attr)
    return desc.output if isinstance(desc, TangentAOTInput) else None


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _rename(own: Any, given: Any) -> None:
    """Renames the symbols of one size as those of the other, if the sizes are then equal. Matches symbols by their age."""
    ours, others = (free_unbacked_symbols(each.expr) for each in (own, given))
    names = dict(zip(_by_age(ours - others), _by_age(others - ours), strict=False))
    if names and own.expr.xreplace(names) == given.expr:
        for symbol, name in names.items():
            rename_unbacked(own.shape_env, symbol, name)


def _by_age(symbols: set[Any]) -> list[Any]:
    return sorted(symbols, key=lambda symbol: int(symbol.name[1:]))
