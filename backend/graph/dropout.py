"""Dropout as it stands in a graph, before and after Inductor's decompositions, and its gradient.

native_dropout(%x, share, True)[0]           mul(mul(gt(rand(…), share), %x), 1 / (1 - share))
native_dropout_backward(%g, mask, scale)     mul(%g, mul(convert(mask), scale))
"""

import operator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import of_tensors, same, same_shape

aten = torch.ops.aten

_RANDOM = (aten.rand.default, aten.rand_like.default)
_CONVERT = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of a node: the share that it sets to 0, what draws the random numbers, and which elements stay."""

    of: fx.Node
    share: float
    drawn: fx.Node
    mask: fx.Node | None

    def gradient_before(self, node: fx.Node) -> fx.Node | None:
        """The gradient of the result for that of `of`, None if this is no such."""
        node = same(node)
        if node.target is aten.native_dropout_backward.default:
            gradient, mask, scale = node.args
            return same(gradient) if self._keeps(mask) and self._divides(scale) else None
        if node.target is not aten.mul.Tensor or not of_tensors(node):
            return None
        for gradient, factor in permutations(same(a) for a in node.args):
            if factor.target is aten.mul.Tensor and self._keeps(factor.args[0]) and self._divides(factor.args[1]):
                return gradient
        return None

    def _keeps(self, node: Any) -> bool:
        mask = same(node)
        mask = same(mask.args[0]) if mask.target in _CONVERT else mask
        if self.mask is None:
            return mask.target is operator.getitem and mask.args == (self.drawn, 1)
        return mask is self.mask

    def _divides(self, scale: Any) -> bool:
        return isinstance(scale, float) and abs(scale * (1 - self.share) - 1) < 1e-9


def dropout_at(node: fx.Node) -> Dropout | None:
    """The dropout whose result a node is."""
    if node.target is operator.getitem and node.args[1] == 0:
        drawn: Any = node.args[0]
        if drawn.target is not aten.native_dropout.default or not drawn.args[2] or not isinstance(drawn.args[1], float):
            return None
        return Dropout(same(drawn.args[0]), drawn.args[1], drawn, None)
    if node.target is not aten.mul.Tensor or not isinstance(node.args[1], float):
        return None
    inner = same(node.args[0])
    if inner.target is not aten.mul.Tensor or not of_tensors(inner):
        return None
    for mask, of in permutations(same(a) for a in inner.args):
        if mask.target is not aten.gt.Scalar or same(mask.args[0]).target not in _RANDOM or not same_shape(mask, of):
            continue
        share = mask.args[1]
        if isinstance(share, int | float):  # else a node: p is an input of the graph
            found = Dropout(of, float(share), same(mask.args[0]), mask)
            return found if found._divides(node.args[1]) else None
    return None
