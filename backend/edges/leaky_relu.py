"""leaky_relu before and after Inductor's decompositions; relu is the one with slope 0.

leaky_relu(%x, slope)      where(gt(%x, 0), %x, mul(%x, slope))
"""

from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import same

aten = torch.ops.aten


def before_leaky_relu(node: fx.Node) -> tuple[fx.Node, float]:
    """What leaky_relu is applied to, and its slope; the node itself and 1 if there is none."""
    node = same(node)
    arguments: tuple[Any, ...] = node.args
    if node.target is aten.leaky_relu.default:
        return same(arguments[0]), float((*arguments, 0.01)[1])
    if node.target is aten.relu.default:
        return same(arguments[0]), 0.0
    if node.target is not aten.where.self:
        return node, 1.0
    condition, kept, scaled = map(same, arguments)
    if condition.target is not aten.gt.Scalar or condition.args[1] != 0 or scaled.target is not aten.mul.Tensor:
        return node, 1.0
    of, slope = scaled.args
    if not isinstance(slope, int | float) or not same(of) is kept is same(condition.args[0]):
        return node, 1.0
    return kept, float(slope)
