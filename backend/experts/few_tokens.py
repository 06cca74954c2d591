"""Layers and products of experts that a few tokens go through, where torch's grouped products may be as fast as the operation.

Both read the same weights, and little more than that takes time. So they are measured (see measuring/expert_times.py), if the
number of tokens is known. The operation is ahead with more tokens: each expert is read once for all of them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from gossamer.backend.devices.budget import Budget
from gossamer.backend.experts.layers import Layer
from gossamer.backend.experts.products import GROUPED, Product
from gossamer.backend.graph.inputs import Static
from gossamer.backend.graph.nodes import Size
from gossamer.backend.measuring.expert_times import FewTokens
from gossamer.runtime.elements import FLOATS

_SLOTS = 2
"""Rows of an average expert. Up to this number, reading weights takes most of the time."""


def measured_layer(layer: Layer, statics: Mapping[fx.Node, Static], budget: Budget | None) -> float | None:
    """Time of the operation for a layer over that of torch's grouped products; None where nothing is close, or measured."""
    gate_up, down = (_weight(product, statics) for product in (layer.up, layer.down))
    target, routing, gate = layer.up.bare.target, layer.routing, layer.gate
    if gate_up is None or down is None or target is not layer.down.bare.target or not _few(routing.pairs, layer.up):
        return None
    assert callable(target)
    tokens: Any = routing.tokens
    return _measured(FewTokens(target, tokens, routing.top, gate_up, down, gate.activation, gate.layout), budget)


def measured_product(product: Product, statics: Mapping[fx.Node, Static], budget: Budget | None) -> float | None:
    """The same of a product that is part of no layer."""
    weight, target, rows = _weight(product, statics), product.bare.target, product.rows.meta["val"].shape[0]
    if weight is None or not _few(rows, product):
        return None
    assert callable(target)
    return _measured(FewTokens(target, rows, 1, weight), budget)


def _few(rows: Size, product: Product) -> bool:
    """Whether an average expert is known to get next to none of so many rows."""
    return isinstance(rows, int) and 0 < rows <= _SLOTS * product.experts


def _weight(product: Product, statics: Mapping[fx.Node, Static]) -> Tensor | None:
    """The weight of a grouped product [experts, rows, columns], if the model has it as it is."""
    static = statics.get(product.weight)
    if static is None or str(product.bare.target) not in GROUPED or static.tensor.dtype not in FLOATS:
        return None
    weight = static.tensor.detach()
    return weight.mT if product.turned else weight


def _measured(case: FewTokens, budget: Budget | None) -> float | None:
    if budget is None or not budget.allows():
        return None
    with budget.spend():
        return case.ratio()
