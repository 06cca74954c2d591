"""Recognises dropout in a graph, before and after Inductor's decompositions.

native_dropout(%x, share, True)[0]           mul(mul(gt(rand(…), share), %x), 1 / (1 - share))
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import same, same_shape
from gossamer.backend.graph.patterns import Hole, Named, Number, Rule, apply, greater, native_dropout, part

aten = torch.ops.aten

_RANDOM = (aten.rand.default, aten.rand_like.default)


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout of a value.

    of     the value
    share  the share of elements that become 0
    drawn  the node that draws the random numbers
    """

    of: fx.Node
    share: float
    drawn: fx.Node


def _by_operation(of: fx.Node, share: float, drawn: fx.Node) -> Dropout | None:
    return Dropout(same(of), share, same(drawn)) if same(drawn).args[2] else None


def _by_product(of: fx.Node, share: float, drawn: fx.Node, mask: fx.Node, scale: float) -> Dropout | None:
    return Dropout(same(of), share, same(drawn)) if same_shape(mask, of) and abs(scale * (1 - share) - 1) < 1e-9 else None


def _is_random(value: Any) -> bool:
    return isinstance(value, fx.Node) and same(value).target in _RANDOM


_of, _share, _scale, _drawn = (
    Hole("of", lambda v: isinstance(v, fx.Node)),
    Number("share"),
    Number("scale"),
    Hole("drawn", _is_random),
)

_DROPOUTS = [
    Rule(part(Named("drawn", native_dropout(_of, _share)), 0), _by_operation),
    Rule((Named("mask", greater(_drawn, _share)) * _of) * _scale, _by_product),
]


def dropout_at(node: fx.Node) -> Dropout | None:
    """Returns the dropout whose result a node is, or None."""
    found: Dropout | None = apply(_DROPOUTS, node)
    return found
