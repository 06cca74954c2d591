"""Recognises which expert each row belongs to, and in which order rows are, from the nodes that compute the routing.

    %flat = view(%experts, [-1])                      pairs of a token and a slot in their natural order
    %sort = sort(%flat)                               %sort[0] the sorted experts, %sort[1] the permutation that sorts them
    %ends = cumsum(histc(%sort[0], E, 0, E - 1), 0)   where the rows of each expert end
    floor_divide(%sort[1], top)                       the tokens of sorted rows
    index_put(%any, [%sort[1]], arange(rows))         the inverse permutation, which brings sorted rows back

`order` is the node of the sort; None if pairs are in their natural order.
"""

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.layout import Axis, Layout, follow, merged, path, spans
from gossamer.backend.graph.nodes import Size, arguments, equal, same, same_shape
from gossamer.backend.graph.patterns import CONVERTS, Hole, Pattern, Rule, apply, match
from gossamer.backend.graph.patterns import Call as Calls

aten, prims = torch.ops.aten, torch.ops.prims

Order = fx.Node | None

INTEGERS = (torch.int64, torch.int32)
"""The types that experts may have."""

_SORTS = (aten.sort.default, aten.sort.stable)
_SCATTERS_ORDER = (aten.scatter.src,)


@dataclass(frozen=True)
class Routing:
    """The experts that tokens chose.

    experts  [tokens, top], or [tokens] with one expert each
    """

    experts: fx.Node

    @property
    def tokens(self) -> Size:
        return self.experts.meta["val"].shape[0]

    @property
    def top(self) -> int:
        shape = self.experts.meta["val"].shape
        return int(shape[1]) if len(shape) == 2 else 1

    @property
    def pairs(self) -> Size:
        """The number of rows: one for each expert of each token."""
        return self.tokens * self.top

    def all_exist(self, count: int) -> bool:
        """Whether all chosen experts are known to be below `count`, because they are the places of the largest of `count`
        scores."""
        choice = self._choice
        return choice is not None and equal(arguments(choice)[0].meta["val"].shape[-1], count)

    @property
    def all_differ(self) -> bool:
        """Whether no token is known to choose an expert twice."""
        steps = path(_plain(self.experts))
        as_chosen = equal(steps[0].meta["val"].shape[-1], self.top) and in_order(steps)
        return self.top == 1 or (as_chosen and self._choice is not None)

    @property
    def _choice(self) -> fx.Node | None:
        """The node that chose the experts as the places of the largest of several scores; None if it is unknown."""
        root = path(_plain(self.experts))[0]
        if root.target is operator.getitem and root.args[1] == 1:
            root = arguments(root)[0]
        chooses = root.target in (aten.topk.default, aten.argmax.default, aten.sort.default)
        return root if chooses and _along_last(root) else None

    @property
    def rows(self) -> Layout:
        """The layout of all pairs in their natural order."""
        return Layout.contiguous((self.pairs,))


@dataclass(frozen=True)
class Ids:
    """A value with the expert of each pair: the routing, the order of the pairs, and the value's layout in all pairs."""

    routing: Routing
    order: Order
    layout: Layout


def ids_at(node: Any) -> Ids | None:
    """Returns the ids that a value has, if it has the expert of each pair, else None."""
    node, views = _plain(node), list[fx.Node]()
    while True:
        whole = path(node)
        views = whole[1:] + views
        root = whole[0]
        if (order := sort_of(root, 0)) is not None:
            found = _natural(order.args[0])
            return None if found is None else Ids(found, order, _follow(Layout.contiguous(root.meta["val"].shape), views))
        if root.target is aten.index.Tensor and (order := _only_order(root)) is not None:
            found = _natural(root.args[0])
            return None if found is None else Ids(found, order, _follow(Layout.contiguous(root.meta["val"].shape), views))
        routing = _routing(whole)
        if routing is None:
            return None
        after = follow(Layout.contiguous(routing.experts.meta["val"].shape), whole[whole.index(routing.experts) + 1 :])
        return None if after is None else Ids(routing, None, after)


def _follow(layout: Layout, views: list[fx.Node]) -> Layout:
    return follow(layout, views) or layout


def _along_last(node: fx.Node) -> bool:
    place = 2 if node.target is aten.topk.default else 1
    dims = arguments(node)[place : place + 1]
    return dims in ((), (-1,), (arguments(node)[0].meta["val"].dim() - 1,))


def _plain(node: Any) -> Any:
    """Returns a value before conversions of its type."""
    while isinstance(node, fx.Node) and same(node).target in CONVERTS:
        node = same(node).args[0]
    return node


def _routing(whole: list[fx.Node]) -> Routing | None:
    """Returns the routing of the last value among these views that has a row for each token, else None."""
    for node in reversed(whole):
        value = node.meta["val"]
        if value.dtype in INTEGERS and value.dim() == 2 and isinstance(value.shape[1], int) and not _is_flat(node, whole):
            return Routing(node)
    node = whole[0]
    value = node.meta["val"]
    return Routing(node) if value.dtype in INTEGERS and value.dim() == 1 else None


def _is_flat(node: fx.Node, whole: list[fx.Node]) -> bool:
    """Whether a matrix is a single column that was made from a matrix with several columns."""
    before = whole[: whole.index(node)]
    return node.meta["val"].shape[1] == 1 and any(n.meta["val"].dim() == 2 for n in before)


def _natural(node: Any) -> Routing | None:
    """Returns the routing of a flat value with the experts of all pairs in their natural order, else None."""
    ids = ids_at(node)
    if ids is None or ids.order is not None or len(ids.layout.dims) != 1 or ids.layout.offset:
        return None
    return ids.routing if spans(ids.layout.dims[0], ids.routing.pairs, 1) else None


def sort_of(node: fx.Node, number: int) -> fx.Node | None:
    """Returns the ascending sort of one dimension whose result `number` a node is, else None."""
    if node.target is not operator.getitem or node.args[1] != number:
        return None
    sort: Any = node.args[0]
    if sort.target not in _SORTS or sort.args[0].meta["val"].dim() != 1:
        return None
    descending = sort.kwargs.get("descending", sort.args[2] if len(sort.args) > 2 else False)
    return None if descending else sort


def sorts(order: fx.Node, routing: Routing) -> bool:
    """Whether a sort puts the pairs of this routing in the order of their experts."""
    return _natural(order.args[0]) == routing


def order_at(node: Any) -> Order:
    """Returns the sort whose permutation a value is, else None."""
    return sort_of(same(node), 1) if isinstance(node, fx.Node) else None


def _only_order(index: fx.Node) -> Order:
    """Returns the sort whose permutation is the only index, else None."""
    indices: Any = index.args[1]
    return order_at(indices[0]) if len(indices) == 1 else None


def tokens_at(node: Any, routing: Routing) -> tuple[bool, Order]:
    """Returns whether a value has the token of each pair, and the order of the pairs."""
    node = _plain(node)
    if not isinstance(node, fx.Node) or node.meta["val"].dim() != 1:
        return False, None
    root = same(node)
    if root.target is aten.index.Tensor and (order := _only_order(root)) is not None:
        return _are_tokens(root.args[0], routing), order
    found = match(_BY_TOP, node)
    if found is not None and found["top"] == routing.top:
        order = order_at(found["pairs"])
        return order is not None or counts_up(found["pairs"]), order
    if routing.top == 1 and (order := order_at(node)) is not None:
        return True, order
    return _are_tokens(node, routing), None


def _are_tokens(node: Any, routing: Routing) -> bool:
    """Whether a value has the tokens in ascending order, each as often as it has experts."""
    found = match(_BY_TOP, node)
    if found is not None and found["top"] == routing.top:
        return counts_up(found["pairs"])
    whole = path(node)
    if not counts_up(whole[0]) or not equal(whole[0].meta["val"].shape[0], routing.tokens):
        return False
    layout = follow(Layout.contiguous(whole[0].meta["val"].shape), whole[1:])
    if layout is None or layout.offset or len(layout.dims) != 1:
        return False
    return same_dims(layout.dims, ((Axis(routing.tokens, 1), Axis(routing.top, 0)),))


def inverts(node: Any) -> Order:
    """Returns the sort whose inverse permutation a value is, else None."""
    node = same(node)
    if (again := sort_of(node, 1)) is not None:
        return order_at(again.args[0])
    if node.target is aten.index_put.default:
        indices: Any = node.args[1]
        values: Any = node.args[2]
        return order_at(indices[0]) if len(indices) == 1 and counts_up(values) and same_shape(values, node) else None
    if node.target in _SCATTERS_ORDER and node.args[1] in (0, -1):
        return order_at(node.args[2]) if counts_up(node.args[3]) and same_shape(node.args[3], node) else None
    return None


def counts_up(node: Any) -> bool:
    """Whether a value is arange(n)."""
    node = _plain(node)
    if not isinstance(node, fx.Node):
        return False
    node = same(node)
    if node.target is aten.arange.default:
        return True
    if node.target is prims.iota.default:
        return node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1
    return node.target in (aten.arange.start, aten.arange.start_step) and node.args[0] == 0 and node.args[2:3] in ((), (1,))


def from_the_end(emit: Emitter, ids: fx.Node, count: int) -> fx.Node:
    """Returns the indices of `count` values, of which negative ones count from the end, as numbers from 0 on."""
    last = emit(aten.add.Tensor, ids, count)
    return emit(aten.where.self, emit(aten.lt.Scalar, ids, 0), last, ids)


def ends_at(node: Any, experts: int) -> Ids | None:
    """Returns the ids of experts, if a value says where the rows of each expert end after sorting, else None."""
    found = match(_CUMULATED, _plain(node))
    counts = None if found is None else same(_plain(found["counts"]))
    return None if counts is None else apply(_COUNTS, counts, experts)


def _of_counts(experts: int, ids: Any, **bounds: Any) -> Ids | None:
    low, high, bins = (bounds.get(name, default) for name, default in (("low", 0), ("high", experts - 1), ("bins", experts)))
    return ids_at(ids) if (low, high, bins) == (0, experts - 1, experts) else None


def _call(*targets: Any) -> Any:
    return lambda *operands: Calls(targets, operands, and_more=True)


def _any_integer(value: Any) -> bool:
    return isinstance(value, int)


_pairs, _ids, _counts = Hole("pairs"), Hole("ids"), Hole("counts")
_BY_TOP: Pattern = _call(aten.floor_divide.default, aten.div.Tensor_mode)(_pairs, Hole("top", _any_integer))
_CUMULATED: Pattern = _call(aten.cumsum.default)(_counts, 0)
_COUNTS = [
    Rule(_call(aten.histc.default)(_ids, Hole("bins"), Hole("low"), Hole("high")), _of_counts),
    Rule(_call(aten.bincount.default)(_ids, None, Hole("bins")), _of_counts),
]
"""Operations that count the rows of each expert. Models that torch.compile traces without a graph break use the first."""


def same_dims(one: Any, other: Any) -> bool:
    """Whether two lists of dimensions go through the same elements."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        a, b = merged(x for x in a if not equal(x.size, 1)), merged(x for x in b if not equal(x.size, 1))
        if len(a) != len(b) or not all(equal(x.size, y.size) and equal(x.stride, y.stride) for x, y in zip(a, b, strict=True)):
            return False
    return True


def in_order(steps: list[fx.Node]) -> bool:
    """Whether views, the steps after the first, have all elements of the first in their order."""
    shape = steps[0].meta["val"].shape
    count, layout = prod(shape), follow(Layout.contiguous(shape), steps[1:])
    if layout is None or layout.offset:
        return equal(count, 0)
    return same_dims((tuple(axis for dim in layout.dims for axis in dim),), Layout.contiguous((count,)).dims)
