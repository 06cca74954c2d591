"""leaky_relu and its gradient, before and after Inductor's decompositions; relu is the one with slope 0.

leaky_relu(%x, slope)                          where(gt(%x, 0), %x, mul(%x, slope))
leaky_relu_backward(%g, %x, slope, False)      where(gt(%x, 0), %g, mul(%g, slope))
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
    branches = _branches(node)
    if branches is not None and branches[0] is branches[1]:
        return branches[1:]
    return node, 1.0


def before_its_gradient(node: fx.Node, raw: fx.Node, slope: float) -> fx.Node | None:
    """The gradient of leaky_relu(raw) if a node is that of raw; the node itself if the slope is 1."""
    if slope == 1:
        return node
    arguments: tuple[Any, ...] = node.args
    if node.target is aten.leaky_relu_backward.default:
        return same(arguments[0]) if same(arguments[1]) is raw and arguments[2:] == (slope, False) else None
    if node.target is aten.threshold_backward.default:
        return same(arguments[0]) if before_leaky_relu(arguments[1]) == (raw, slope) and arguments[2] == 0 else None
    branches = _branches(node)
    return (
        branches[1] if branches is not None and (branches[0], branches[2]) == (raw, slope) and branches[1] is not raw else None
    )


def _branches(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """(%x, %y, slope) of where(gt(%x, 0), %y, mul(%y, slope))."""
    if node.target is not aten.where.self:
        return None
    condition, kept, scaled = (same(a) for a in node.args)
    if condition.target is not aten.gt.Scalar or condition.args[1] != 0 or scaled.target is not aten.mul.Tensor:
        return None
    of, slope = scaled.args
    if not isinstance(slope, int | float) or same(of) is not kept:
        return None
    return same(condition.args[0]), kept, float(slope)
