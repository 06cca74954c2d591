"""masked-gradients: the gradient of a parameter under a mask is summed where the mask keeps it.

    %0 = mm(permute(%g), %x)                 →    %1 = gossamer::masked_gradient(%g, %x, %mask)
    %1 = mul(permute(permute(%0)), %mask)

What comes out is dense, as the parameter is. Where the mask keeps much, or tokens are few, dense is as fast, and stays. How
that is for convolutions is in filter_gradients.py.
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

_DENSEST = 0.25  # sums at the entries take as long as a dense product for a third of them
_FEWEST = 64  # tokens


@dataclass(frozen=True)
class _Product:
    """The mask times gᵀ x."""

    g: fx.Node
    x: fx.Node
    mask: fx.Node

    @property
    def tokens(self) -> int | None:
        """Rows of g; None where their number is not known."""
        return hint(self.g.meta["val"].shape[0])

    def emitted(self, emit: Emitter) -> fx.Node:
        """It as one operation."""
        return emit(masked_gradient, self.g, self.x, self.mask)


class MaskedGradients:
    """Gradients under masks are computed at what the masks keep."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """A decision for each gradient of a matrix under a static mask."""
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
    """`planar` tells whether images have pixels innermost, because a convolution in the graph is sparse."""
    share, images = density(static.tensor), isinstance(found, FilterGradient)
    gain = found.gain(round(share * static.tensor.numel())) if isinstance(found, FilterGradient) and min_gain > 0 else None
    refused = _refusal(found, share, gain, planar, min_gain) if min_gain > 0 else None
    name, shape = _name(static.name), tuple(static.tensor.shape)
    if refused is not None:
        return Decision.dense(name, "gradient", shape, share, refused, gain)
    schedule = "places" if images else "tokens"
    return Decision(name, "gradient", shape, share, "CSR", schedule, True, "where the mask keeps it", gain)


def _refusal(found: "_Product | FilterGradient", share: float, gain: float | None, planar: bool, min_gain: float) -> str | None:
    """Why a gradient stays dense, None if it does not."""
    if isinstance(found, FilterGradient):
        if not planar:  # images, and masks with them, would be copied at every call
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
    """That of the weight under a mask of a parametrization, of the mask itself anywhere else."""
    return re.sub(r"parametrizations\.(\w+)\.\d+\.\w+$", r"\1", mask)


def _gradient_at(node: fx.Node, statics: dict[fx.Node, Static]) -> "_Product | FilterGradient | None":
    """What a node is, if it is the product of a gradient and a static mask of its shape."""
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
