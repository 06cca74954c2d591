"""masked-gradients: the gradient of a parameter under a mask is summed where the mask keeps it.

    %0 = mm(permute(%g), %x)                 →    %1 = gossamer::masked_gradient(%g, %x, %mask)
    %1 = mul(permute(permute(%0)), %mask)

    %0 = getitem(convolution_backward(%g, %x, ...), 1)        →    %1 = gossamer::masked_gradient(%g, %x, %mask)
    %1 = mul(%0, %mask)                                            of pointwise convolutions

What comes out is dense, as the parameter is. Where the mask keeps much, or tokens are few, dense is as fast, and stays.
"""

import operator
import re
from math import prod
from typing import Any, ClassVar

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
_DENSE_US, _CALL_US = 13e-6, 150.0  # of pointwise convolutions: for a multiplication of the dense one, and once
_SUMS, _PACKED = 3.2, 43.0  # how many of these a sum takes, and an element that is packed


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
            share, tokens = density(static.tensor), _tokens(g.meta["val"])
            pays = context.options.min_gain == 0 or (
                share <= _DENSEST and tokens is not None and _pays(static.tensor, share, tokens)
            )
            if pays:
                emit = Emitter(node)
                node.replace_all_uses_with(emit(masked_gradient, g, x, mask))
            what = "tokens" if static.tensor.dim() == 2 else "pixels"
            refused = "too dense for a gain" if share > _DENSEST else f"too small for a gain: {tokens} {what}"
            reason = "where the mask keeps it" if pays else refused
            shape, schedule = tuple(static.tensor.shape), "tokens" if pays else None
            format, name = "CSR" if pays else None, _name(static.name)
            decisions.append(Decision(name, "gradient", shape, share, format, schedule, pays, reason, None))
        graph.eliminate_dead_code()
        return decisions


def _tokens(g: torch.Tensor) -> int | None:
    """Rows of a gradient, or pixels of all images; None where their number is not known."""
    hints = [hint(size) for axis, size in enumerate(g.shape) if axis != 1]
    return None if None in hints else prod(hints)  # type: ignore[arg-type]


def _pays(mask: torch.Tensor, share: float, tokens: int) -> bool:
    """Whether sums at what a mask keeps take less time than the dense product; of images all channels are packed for it."""
    if mask.dim() == 2:
        return tokens >= _FEWEST
    rows, columns = mask.shape[:2]
    dense = _DENSE_US * rows * columns * tokens
    return dense > _CALL_US + dense * (_SUMS * share + _PACKED * (1 / rows + 1 / columns))


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
        pixels = _of_images(product, mask)
        if pixels is not None:
            return *pixels, mask
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


def _of_images(product: fx.Node, mask: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The gradient of the result and the images, if a node is the gradient of a pointwise kernel of the mask's shape."""
    if product.target is not operator.getitem or product.args[1] != 1 or len(product.users) > 1:
        return None
    backward: Any = product.args[0]
    if backward.target is not aten.convolution_backward.default:
        return None
    g, x, _, _, stride, padding, _, transposed, _, groups, _ = backward.args
    values = [each.meta["val"] for each in (g, x, product, mask)]
    sizes = values[3].shape
    flat = all(n == 1 for n in (*sizes[2:], *stride)) and not any(padding) and groups == 1 and not transposed
    alike = values[2].shape == sizes and len({(each.dtype, each.device.type) for each in values}) == 1
    if not flat or not alike or values[0].dim() != len(sizes) or not values[0].is_cpu:
        return None
    return (g, x) if values[0].dtype in (torch.float32, torch.float64) else None
