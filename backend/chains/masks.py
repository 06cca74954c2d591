"""Finds out from the graph what a mask of attention hides, so that kernels can skip work.

%m = where(le(index(%iota, ..), index(%iota, ..)), 0, -inf)             causal: no mask is needed
%m = where(bitwise_and(%padding, le(...)), 0, -inf)                      hides later keys: kernels skip them
%m = where(bitwise_and(%padding, ge(index(%iota, ..), 0)), 0, -inf)      the same for all queries: one row is enough
"""

from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.expressions import computed_from, cut, evaluated, is_pure
from gossamer.backend.graph.nodes import COPIES, SPREADS, ancestors, arguments, equal, equal_sizes
from gossamer.runtime.torch_internals import OpOverload

aten, prims = torch.ops.aten, torch.ops.prims

_IN_PLACE = COPIES | {aten.expand.default, aten.slice.Tensor, aten._to_copy.default, aten.where.ScalarSelf}
"""Operations that leave rows where they are, besides those that torch tags as pointwise."""

_UNIFORM = {aten.full.default, aten.zeros.default, aten.ones.default}

_SHIFTS = {aten.slice.Tensor, aten.add.Tensor}

_ANDS = {aten.bitwise_and.Tensor, aten.logical_and.default}


class Constants:
    """The values of a graph that depend on none of its inputs. Each is computed when it is asked for."""

    def __init__(self, graph: fx.Graph) -> None:
        self._constant = computed_from(graph, ())
        self._values: dict[fx.Node, torch.Tensor] = {}

    def of(self, node: fx.Node) -> torch.Tensor | None:
        """Returns the value of a node; None if it depends on inputs, or on dynamic sizes."""
        if node not in self._constant or not all(n in self._constant for n in node.all_input_nodes):
            return None
        if node not in self._values:
            try:  # in one go, because intermediate values may be large and are not kept
                (self._values[node],) = evaluated(cut([node], ()).evaluate, ())
            except (RuntimeError, TypeError):
                return None
        return self._values[node]


def is_causal(mask: torch.Tensor | None) -> bool:
    """Whether a mask hides exactly the later keys, by minus infinity or about the lowest finite number."""
    if mask is None or mask.shape[-1] != mask.shape[-2]:
        return False
    later, lowest = _later(mask.shape[-1]), torch.finfo(mask.dtype).min
    return bool((mask[..., later] <= lowest / 2).all()) and bool((mask[..., ~later] == 0).all())


def hides_later_keys(mask: fx.Node, constants: Constants) -> bool:
    """Whether a mask is known to be minus infinity for all keys after the query. It may hide other keys, too.

    The lowest finite number is not enough: a query whose keys are all hidden by it attends to all of them equally.
    """
    length = mask.meta["val"].shape[-1]
    if not isinstance(length, int) or not _square(mask, length):
        return False
    known = constants.of(mask)
    if known is not None:
        return _all_later(known.isneginf())
    if mask.target is not aten.where.self:
        return False
    condition, _, otherwise = arguments(mask)
    hidden = constants.of(otherwise)
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


def same_for_queries(mask: fx.Node) -> bool:
    """Whether a mask [.., queries, keys] is known to have the same row for all queries."""
    known: dict[fx.Node, bool] = {}
    for node in ancestors([mask], lambda n: not is_pure(n)):
        known[node] = _one_query(node) or (is_pure(node) and _keeps_alike(node, known))
    return known[mask]


def _keeps_alike(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a node has the same row for all queries. `known` says so of its operands."""
    if node.target in _UNIFORM or (node.target is aten.ge.Scalar and _at_least(node.args[0], node.args[1])):
        return True
    elementwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return (elementwise or node.target in _IN_PLACE) and all(known[n] for n in tensors)


def _one_query(node: fx.Node) -> bool:
    """Whether a tensor has a single row, which is broadcast to all queries."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.dim() < 2 or equal(value.shape[-2], 1))


def _at_least(node: Any, least: Any) -> bool:
    """Whether no element of `node` is below `least`. Recognises ranges of positions, plus constants."""
    while isinstance(node, fx.Node) and node.target in SPREADS | _SHIFTS:
        if node.target is aten.add.Tensor:
            if not isinstance(node.args[1], int) or node.kwargs:
                return False
            least -= node.args[1]
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target not in (prims.iota.default, aten.arange.default):
        return False
    first, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    return isinstance(first, int) and isinstance(step, int) and step >= 0 and first >= least


class FirstAlike:
    """Maps nodes that compute the same value to one of them, so that layers share one mask."""

    def __init__(self) -> None:
        self._first: dict[fx.Node, fx.Node] = {}
        self._by_text: dict[str, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """Returns the first node asked for that computes the same as `node`. Ask in the order of the graph."""
        for each in ancestors([node], self._first.__contains__):
            if each in self._first:
                continue
            arguments = fx.map_arg((each.args, each.kwargs), lambda n: self._first.get(n, n))
            text = f"{each.target} {arguments}" if is_pure(each) else each.name
            self._first[each] = self._by_text.setdefault(text, each)
        return self._first[node]


def _square(node: fx.Node, length: int) -> bool:
    """Whether a value has an element for each query and key."""
    return equal_sizes(node.meta["val"].shape[-2:], (length, length))


def _all_later(hidden: torch.Tensor) -> bool:
    return bool(hidden[..., _later(hidden.shape[-1])].all())


def _later(length: int) -> torch.Tensor:
    """[query, key]: whether the key comes after the query."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)
