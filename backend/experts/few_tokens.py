"""Measures layers and products of experts with a few tokens, where torch's grouped products may be as fast as the operation.

Both read the same weights, which takes most of the time. So both are measured (see measuring/expert_times.py), if the number of
tokens is known. With more tokens, the operation is faster, because it reads each expert once for all of them.
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
"""Most rows of an average expert for which reading weights takes most of the time."""


def measured_layer(layer: Layer, statics: Mapping[fx.Node, Static], budget: Budget | None) -> float | None:
    """Returns the operation's time for a layer divided by the time of torch's grouped products; None if it was not measured."""
    gate_up, down = (_weight(product, statics) for product in (layer.up, layer.down))
    target, routing, gate = layer.up.bare.target, layer.routing, layer.gate
    if gate_up is None or down is None or target is not layer.down.bare.target or not _few(routing.pairs, layer.up):
        return None
    assert callable(target)
    tokens: Any = routing.tokens
    return _measured(FewTokens(target, tokens, routing.top, gate_up, down, gate.activation, gate.layout), budget)


def measured_product(product: Product, statics: Mapping[fx.Node, Static], budget: Budget | None) -> float | None:
    """Returns the same ratio for a product that is not part of a layer."""
    weight, target, rows = _weight(product, statics), product.bare.target, product.rows.meta["val"].shape[0]
    if weight is None or not _few(rows, product):
        return None
    assert callable(target)
    return _measured(FewTokens(target, rows, 1, weight), budget)


def _few(rows: Size, product: Product) -> bool:
    """Whether the number of rows is known, and an average expert gets only a few."""
    return isinstance(rows, int) and 0 < rows <= _SLOTS * product.experts


def _weight(product: Product, statics: Mapping[fx.Node, Static]) -> Tensor | None:
    """Returns the weight [experts, rows, columns] of a grouped product, if it is a tensor of the model, else None."""
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
