"""What the graph says about masks of attention before it runs: those that are constant, and keys that are hidden from all.

%m = where(le(index(%iota, ..), index(%iota, ..)), 0, -inf)             causal: not needed at all
%m = where(bitwise_and(%padding, le(...)), 0, -inf)                      keys after the query need not be looked at
"""

from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.expressions import computed_from, cut, evaluated
from gossamer.backend.graph.nodes import SPREADS, equal_sizes
from gossamer.backend.graph.strips import strips
from gossamer.sparsity.attention.tile_table import LARGE, Strips

aten = torch.ops.aten

_ANDS = {aten.bitwise_and.Tensor, aten.logical_and.default}


class Constants:
    """The values of a graph that depend on none of its inputs, computed when they are asked for."""

    def __init__(self, graph: fx.Graph) -> None:
        self._constant = computed_from(graph, ())
        self._values: dict[fx.Node, torch.Tensor] = {}

    def strips(self, node: fx.Node) -> Strips | None:
        """The value of a node some queries at a time; None if it is small enough for `of`, or not known there."""
        known = self._known(node) and node.meta["val"].numel() >= LARGE
        return strips(cut([node], ()).evaluate) if known else None

    def _known(self, node: fx.Node) -> bool:
        return node in self._constant and all(n in self._constant for n in node.all_input_nodes)

    def of(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a node; None if it depends on inputs, or on sizes that are not fixed."""
        if not self._known(node):
            return None
        if node not in self._values:
            try:  # at once, so that nothing on the way is kept: it may be large
                (self._values[node],) = evaluated(cut([node], ()).evaluate, ())
            except (RuntimeError, TypeError):
                return None
        return self._values[node]


def is_causal(mask: torch.Tensor | None) -> bool:
    """Whether a mask hides all later keys, by numbers as low as can be or minus infinity, and nothing else."""
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return False
    later, lowest = _later(mask.shape[-1]), torch.finfo(mask.dtype).min
    return bool((mask[..., later] <= lowest / 2).all()) and bool((mask[..., ~later] == 0).all())


def hides_later_keys(mask: fx.Node, constants: Constants) -> bool:
    """Whether a mask is known to be minus infinity for all keys after the query, whatever else it hides. A lower bound will not
    do here: it is the same as none for a query all of whose keys are hidden."""
    length = mask.meta["val"].shape[-1]
    if not isinstance(length, int) or not _square(mask, length):
        return False
    known = constants.of(mask)
    if known is not None:
        return _all_later(known.isneginf())
    if mask.target is not aten.where.self:
        return False
    condition, _, otherwise = mask.args
    hidden = constants.of(otherwise)  # type: ignore[arg-type]
    if hidden is None or not bool(hidden.isneginf().all()):
        return False
    pending: list[Any] = [condition]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or not _square(node, length):
            continue
        value = constants.of(node)
        if value is not None and value.dtype is torch.bool:
            if _all_later(~value):
                return True
        elif node.target in _ANDS:
            pending += node.args
        elif node.target in SPREADS:
            pending.append(node.args[0])
    return False


def _square(node: fx.Node, length: int) -> bool:
    """Whether a value has an element for each query and key."""
    return equal_sizes(node.meta["val"].shape[-2:], (length, length))


def _all_later(hidden: torch.Tensor) -> bool:
    return bool(hidden[..., _later(hidden.shape[-1])].all())


def _later(length: int) -> torch.Tensor:
    """[query, key]: whether the key comes after the query."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)
