"""Recognises leaky_relu before and after Inductor's decompositions. relu counts as leaky_relu with slope 0."""

import torch
from torch import fx

from gossamer.backend.graph.nodes import same
from gossamer.backend.graph.patterns import Call, Hole, Number, Rule, apply, greater, where

aten = torch.ops.aten

_X, _SLOPE = Hole("x"), Number("slope")

_SPELLINGS = [
    Rule(Call((aten.leaky_relu.default,), (_X, _SLOPE)), lambda x, slope: (same(x), slope)),
    Rule(Call((aten.leaky_relu.default,), (_X,)), lambda x: (same(x), 0.01)),
    Rule(Call((aten.relu.default,), (_X,)), lambda x: (same(x), 0.0)),
    Rule(where(greater(_X, 0), _X, _X * _SLOPE), lambda x, slope: (same(x), slope)),
]


def before_leaky_relu(node: fx.Node) -> tuple[fx.Node, float]:
    """Returns the operand and the slope of leaky_relu; for other nodes, the node itself and slope 1."""
    found: tuple[fx.Node, float] = apply(_SPELLINGS, node) or (same(node), 1.0)
    return found
