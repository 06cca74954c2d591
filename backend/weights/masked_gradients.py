"""masked-gradients: the gradient of a parameter under a mask is summed where the mask keeps it.

    %0 = mm(permute(%g), %x)                 →    %1 = gossamer::masked_gradient(%g, %x, %mask)
    %1 = mul(permute(permute(%0)), %mask)

What comes out is dense, as the parameter is. Where the mask keeps much, or tokens are few, dense is as fast, and stays.
"""

import re
from typing import ClassVar

import torch
from torch import fx

from gossamer.backend.calls.masked_gradient import masked_gradient
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static, density
from gossamer.backend.graph.masked_matrix import turned
from gossamer.backend.graph.nodes import hint, is_backward, same
from gossamer.backend.report.report import Decision

aten = torch.ops.aten

_DENSEST = 0.2  # sums at the entries take as long as a dense product for a third of them
_FEWEST = 64  # tokens


class MaskedGradients:
    """Gradients under masks are computed at what the masks keep."""

    name: ClassVar[str] = "masked-gradients"

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each gradient of a matrix under a static mask."""
        if context.options.schedule == "reference":
            return []
        statics, decisions = context.inputs.match(graph), list[Decision]()
        for node in list(graph.nodes):
            found = _gradient_at(node, statics)
            if found is None:
                continue
            g, x, mask = found
            static = statics[same(mask)]
            share, tokens = density(static.tensor), hint(g.meta["val"].shape[0])
            pays = context.options.min_gain == 0 or (share <= _DENSEST and tokens is not None and tokens >= _FEWEST)
            if pays:
                emit = Emitter(node)
                node.replace_all_uses_with(emit(masked_gradient, g, x, mask))
            refused = "too dense for a gain" if share > _DENSEST else f"too small for a gain: {tokens} tokens"
            reason = "where the mask keeps it" if pays else refused
            shape, schedule = tuple(static.tensor.shape), "tokens" if pays else None
            format, name = "CSR" if pays else None, _name(static.name)
            decisions.append(Decision(name, "gradient", shape, share, format, schedule, pays, reason, None))
        graph.eliminate_dead_code()
        return decisions


def _name(mask: str) -> str:
    """That of the weight under a mask of a parametrization, of the mask itself anywhere else."""
    return re.sub(r"parametrizations\.(\w+)\.\d+\.\w+$", r"\1", mask)


def _gradient_at(node: fx.Node, statics: dict[fx.Node, Static]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """g, x and the mask, if a node is the product of a gradient g.T @ x of this shape and a static mask."""
    if node.target is not aten.mul.Tensor or not is_backward(node):
        return None
    for product, mask in (node.args, node.args[::-1]):
        if not isinstance(product, fx.Node) or not isinstance(mask, fx.Node) or same(mask) not in statics:
            continue
        mm, turns = turned(product)
        if mm.target is not aten.mm.default:
            continue
        left, right = mm.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        g, across = turned(left)
        values = [each.meta["val"] for each in (g, right, mask)]
        if across % 2 == 0 or values[2].shape != node.meta["val"].shape or values[2].device.type != "cpu":
            continue
        if len({value.dtype for value in values}) > 1 or values[2].dtype not in (torch.float32, torch.float64):
            continue
        return (g, right, mask) if turns % 2 == 0 else (right, g, mask)
    return None
