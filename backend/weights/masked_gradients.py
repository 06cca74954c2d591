"""masked-gradients: the gradient of a parameter under a mask is computed only for entries that the mask keeps.

    %0 = mm(permute(%g), %x)                 →    %1 = gossamer::masked_gradient(%g, %x, %mask)
    %1 = mul(permute(permute(%0)), %mask)

The result is dense, like the parameter. If the mask keeps many entries, or there are few tokens, the dense product is as fast,
and stays. See filter_gradients.py for convolutions.
"""

import re
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.convolution.filter_gradients import FilterGradient, gradient_of
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static, density
from gossamer.backend.graph.masked_matrix import turned
from gossamer.backend.graph.nodes import hint, is_backward, same
from gossamer.backend.report.report import Decision
from gossamer.backend.run.masked_gradient import masked_gradient
from gossamer.backend.run.region_op import takes_images

aten = torch.ops.aten

_DENSEST = 0.25  # density of the mask; at a third, sums of single entries take as long as the dense product
_FEWEST = 64  # tokens; fewer gain nothing


@dataclass(frozen=True)
class _Product:
    """The product gᵀ x, times the mask."""

    g: fx.Node
    x: fx.Node
    mask: fx.Node

    @property
    def tokens(self) -> int | None:
        """The number of rows of g; None if it is not known."""
        return hint(self.g.meta["val"].shape[0])

    def emitted(self, emit: Emitter) -> fx.Node:
        """Emits one operation that computes it."""
        return emit(masked_gradient, self.g, self.x, self.mask)


class MaskedGradients:
    """Gradients under masks are computed only for entries that the masks keep."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Returns a decision for each gradient of a parameter under a static mask."""
        if context.options.schedule == "reference":
            return []
        statics, decisions, planar = context.inputs.match(graph), list[Decision](), takes_images(graph)
        for node in list(graph.nodes):
            found = _gradient_at(node, statics)
            if found is None:
                continue
            static = statics[same(found.mask)]
            decision = _decided(found, static, planar, context.options.min_gain)
            if decision.sparse:
                node.replace_all_uses_with(found.emitted(Emitter(node)))
            decisions.append(decision)
        graph.eliminate_dead_code()
        return decisions


def _decided(found: "_Product | FilterGradient", static: Static, planar: bool, min_gain: float) -> Decision:
    """Decides about a gradient. `planar` tells whether images have pixels innermost (see `takes_images`)."""
    share, images = density(static.tensor), isinstance(found, FilterGradient)
    gain = found.gain(round(share * static.tensor.numel())) if isinstance(found, FilterGradient) and min_gain > 0 else None
    refused = _refusal(found, share, gain, planar, min_gain) if min_gain > 0 else None
    name, shape = _name(static.name), tuple(static.tensor.shape)
    if refused is not None:
        return Decision.dense(name, "gradient", shape, share, refused, gain)
    schedule = "places" if images else "tokens"
    return Decision(name, "gradient", shape, share, "CSR", schedule, True, "where the mask keeps it", gain)


def _refusal(found: "_Product | FilterGradient", share: float, gain: float | None, planar: bool, min_gain: float) -> str | None:
    """Returns why a gradient stays dense, or None if it becomes sparse."""
    if isinstance(found, FilterGradient):
        if not planar:  # Inductor would copy the images and the mask at every call
            return "no convolution is sparse here, and dense ones have channels innermost"
        if gain is None:
            return "the number of pixels is not known"
        return None if gain >= min_gain else f"too dense or small for a gain of {min_gain:g}x"
    if share > _DENSEST:
        return "too dense for a gain"
    if found.tokens is None:
        return "the number of tokens is not known"
    return None if found.tokens >= _FEWEST else f"too small for a gain: {found.tokens} tokens"


def _name(mask: str) -> str:
    """Returns the name of the weight under a parametrization's mask. Other masks keep their own name."""
    return re.sub(r"parametrizations\.(\w+)\.\d+\.\w+$", r"\1", mask)


def _gradient_at(node: fx.Node, statics: dict[fx.Node, Static]) -> "_Product | FilterGradient | None":
    """Returns the product of a gradient and a static mask of its shape that a node computes, or None."""
    if node.target is not aten.mul.Tensor or not is_backward(node):
        return None
    for product, mask in (node.args, node.args[::-1]):
        if not isinstance(product, fx.Node) or not isinstance(mask, fx.Node) or same(mask) not in statics:
            continue
        found = gradient_of(product, mask) or _of_matrices(node, product, mask)
        if found is not None:
            return found
    return None


def _of_matrices(node: fx.Node, product: fx.Node, mask: fx.Node) -> "_Product | None":
    mm, turns = turned(product)
    if mm.target is not aten.mm.default:
        return None
    left, right = mm.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    g, across = turned(left)
    values = [each.meta["val"] for each in (g, right, mask)]
    if across % 2 == 0 or values[2].shape != node.meta["val"].shape or values[2].device.type != "cpu":
        return None
    if len({value.dtype for value in values}) > 1 or values[2].dtype not in (torch.float32, torch.float64):
        return None
    return _Product(g, right, mask) if turns % 2 == 0 else _Product(right, g, mask)
