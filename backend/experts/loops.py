"""Layers that a model computes expert by expert, in a loop that Dynamo has unrolled.

    for e in range(experts):                                         for e in range(experts):
        token, slot = torch.where(chosen == e)                           own = (scores * (chosen == e)).sum(-1, keepdim=True)
        y.index_add_(0, token, expert(x[token]) * scores[token, slot, None])     y = y + expert(x) * own

The weights are parts of one parameter, weight[e]. The left one is traced under
torch._dynamo.config.capture_dynamic_output_shape_ops alone.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.gates import Gate, gate_at
from gossamer.backend.experts.layers import Layer, is_zeros
from gossamer.backend.experts.products import Product
from gossamer.backend.experts.routes import Routing
from gossamer.backend.graph.layout import Layout, follow, path
from gossamer.backend.graph.nodes import arguments, equal_sizes, is_backward, same
from gossamer.backend.graph.patterns import CONVERTS, LAST, Call, Hole, Pattern, converted, match, one_of

aten = torch.ops.aten

_ADDS = {aten.add.Tensor, aten.index_add.default, aten.index_put.default}


@dataclass(frozen=True)
class _Place:
    """The weight of one expert: part `expert` of a parameter, turned where its rows are inputs."""

    weight: fx.Node
    expert: int
    turned: bool
    bias: fx.Node | None


@dataclass(frozen=True)
class _Term:
    """What one expert adds."""

    expert: int
    x: fx.Node
    experts: fx.Node
    scores: fx.Node
    up: _Place
    down: _Place
    sums: fx.Node
    hidden: fx.Node
    result: fx.Node


def loops(graph: fx.Graph) -> list[Layer]:
    """The layers that are written so."""
    found = list[Layer]()
    for node in graph.nodes:
        if node.target in _ADDS and not is_backward(node) and not any(_before(user) is node for user in node.users):
            layer = _loop(node)
            if layer is not None:
                found.append(layer)
    return found


def _before(node: fx.Node) -> Any:
    """What a step of a loop adds to."""
    return arguments(node)[0] if node.target in _ADDS else None


def _loop(node: fx.Node) -> Layer | None:
    """The layer whose last step a node is."""
    terms, into = list[_Term](), node
    while isinstance(into, fx.Node) and into.target in _ADDS and (term := _term(into)) is not None:
        terms.append(term)
        into = arguments(into)[0]
    if len(terms) < 2 or not isinstance(into, fx.Node):
        return None
    first = terms[-1]
    count = int(first.up.weight.meta["val"].shape[0])
    if sorted(term.expert for term in terms) != list(range(count)) or not all(_alike(term, first) for term in terms):
        return None
    gates = {_gate(term) for term in terms}
    gate = gates.pop() if len(gates) == 1 else None
    if gate is None:
        return None
    routing = Routing(first.experts)
    up, down = (
        _product(place, term_node, routing) for place, term_node in ((first.up, first.sums), (first.down, first.result))
    )
    return Layer(node, None if is_zeros(into) else into, first.x, routing, first.scores, up, down, gate)


def _gate(term: _Term) -> Gate | None:
    columns = term.down.weight.meta["val"].shape[1 if term.down.turned else 2]
    return gate_at(term.hidden, term.sums, 1, int(term.sums.meta["val"].shape[1]), int(columns))


def _alike(term: _Term, other: _Term) -> bool:
    nodes = [(each.x, each.experts, each.scores, *_params(each.up), *_params(each.down)) for each in (term, other)]
    return nodes[0] == nodes[1] and term.up.expert == term.expert == term.down.expert


def _params(place: _Place) -> tuple[Any, ...]:
    return place.weight, place.turned, place.bias


def _product(place: _Place, node: fx.Node, routing: Routing) -> Product:
    return Product(node, node, node, None, place.weight, place.turned, place.bias, routing, None, None, False)


def _term(node: fx.Node) -> _Term | None:
    """What a step adds: the rows of an expert times their scores."""
    token, value = _added(node)
    if not isinstance(value, fx.Node) or same(value).target is not aten.mul.Tensor:
        return None
    value = same(value)
    for result, weight in (arguments(value), arguments(value)[::-1]):
        found = _weighted(weight, token)
        if found is None or not isinstance(result, fx.Node):
            continue
        experts, scores, expert = found
        down = _linear(result)
        if down is None:
            continue
        hidden, place = down
        up = _first_product(hidden)
        if up is None:
            continue
        sums, x, first = up
        rows = _rows(x, token)
        if rows is None or rows.meta["val"].dim() != 2:
            continue
        return _Term(expert, rows, experts, scores, first, place, sums, hidden, _whole(result))
    return None


def _added(node: fx.Node) -> tuple[fx.Node | None, Any]:
    """The tokens that a step adds to, None where these are all, and what it adds."""
    args: Any = arguments(node)
    if node.target is aten.add.Tensor:
        return (None, args[1]) if not node.kwargs else (None, None)
    if node.target is aten.index_add.default:
        return (args[2], args[3]) if args[1] == 0 and not node.kwargs else (None, None)
    indices = args[1]
    if len(indices) != 1:
        return None, None
    if any(args[3:]):
        return indices[0], args[2]
    total = same(args[2])
    if total.target is not aten.add.Tensor or total.kwargs:
        return None, None
    for own, value in (arguments(total), arguments(total)[::-1]):
        read = isinstance(own, fx.Node) and same(own).target is aten.index.Tensor and arguments(same(own))[0] is args[0]
        if read and _only_index(same(own)) is indices[0]:
            return indices[0], value
    return None, None


def _only_index(index: Any) -> Any:
    return arguments(index)[1][0] if len(arguments(index)[1]) == 1 else None


def _weighted(weight: Any, token: fx.Node | None) -> tuple[fx.Node, fx.Node, int] | None:
    """The experts, the scores, and the number of the expert of whose tokens a value has the scores, [.., 1]."""
    if not isinstance(weight, fx.Node):
        return None
    if token is None:
        found = match(_OWN_SCORES, weight)
        if found is None or found["scores"].meta["val"].dim() != 2:
            return None
        chosen = _chosen(found["mask"])
        return None if chosen is None else (chosen[0], found["scores"], chosen[1])
    whole = path(weight)
    root = whole[0]
    indices: Any = arguments(root)[1] if root.target is aten.index.Tensor else ()
    where = _where(token)
    if len(indices) != 2 or where is None or indices[0] is not token:
        return None
    experts, expert, slot = where
    scores = path(arguments(root)[0])[0]
    shape = experts.meta["val"].shape
    layout = follow(Layout.contiguous(scores.meta["val"].shape), path(arguments(root)[0])[1:])
    if indices[1] is not slot or not equal_sizes(scores.meta["val"].shape, shape) or layout is None:
        return None
    return (experts, scores, expert) if layout.dims[:2] == Layout.contiguous(shape).dims else None


def _where(token: fx.Node) -> tuple[fx.Node, int, fx.Node] | None:
    """The experts, the number of the one whose tokens a value has, and the node of their slots."""
    if token.target is not operator.getitem:
        return None
    parts: Any = arguments(token)[0]
    if (
        parts.target is not aten.unbind.int
        or arguments(parts)[1:] != (1,)
        or arguments(parts)[0].target is not aten.nonzero.default
    ):
        return None
    mask: Any = arguments(parts)[0].args[0]
    number: Any = arguments(token)[1]
    slot = next((user for user in parts.users if arguments(user)[1] == 1 - number), None)
    if slot is None:
        return None
    chosen = _chosen(mask) if number == 0 else None
    if number == 1 and (found := _one_hot(mask)) is not None:
        chosen = found
    return None if chosen is None else (*chosen, slot)


def _chosen(mask: Any) -> tuple[fx.Node, int] | None:
    """The experts [tokens, top] and the number that a mask compares them with."""
    while isinstance(mask, fx.Node) and same(mask).target in CONVERTS:
        mask = arguments(same(mask))[0]
    found = match(_EQUAL, mask)
    if found is None or not isinstance(found["number"], int) or found["experts"].meta["val"].dim() != 2:
        return None
    return found["experts"], found["number"]


def _one_hot(mask: Any) -> tuple[fx.Node, int] | None:
    """The same of part `expert` of one_hot(experts), its dimensions turned round: [experts, top, tokens]."""
    mask = same(mask)
    if mask.target is not aten.select.int or arguments(mask)[1] != 0:
        return None
    turned = same(arguments(mask)[0])
    if turned.target is not aten.permute.default or list(arguments(turned)[1]) != [2, 1, 0]:
        return None
    found = match(_ONE_HOT, arguments(turned)[0])
    if (
        found is None
        or same(found["column"]).target is not aten.unsqueeze.default
        or same(found["count"]).target is not aten.arange.default
    ):
        return None
    experts: Any = same(found["column"]).args[0]
    return (experts, arguments(mask)[2]) if experts.meta["val"].dim() == 2 else None


def _rows(x: Any, token: fx.Node | None) -> fx.Node | None:
    """The tokens that a product is of, all or those of an expert."""
    x = _whole(x)
    if token is None:
        return x
    if x.target is not aten.index.Tensor:
        return None
    *first, index = arguments(x)[1]
    if index is not token or any(each is not None for each in first):
        return None
    if not first:
        return arguments(x)[0]
    source = same(arguments(x)[0])
    return (
        arguments(source)[0]
        if len(first) == 1 and source.target is aten.unsqueeze.default and arguments(source)[1] == 0
        else None
    )


def _whole(node: Any) -> fx.Node:
    """A value before views that keep its rows."""
    while (whole := path(node))[0] is not node and equal_sizes(whole[0].meta["val"].shape[-1:], node.meta["val"].shape[-1:]):
        node = whole[0]
    found: fx.Node = same(node)
    return found


def _linear(result: Any) -> tuple[fx.Node, _Place] | None:
    """What a linear layer of one expert multiplies, and its weight."""
    node = _whole(result)
    args: Any = arguments(node)
    bias: fx.Node | None = None
    if node.target is aten.addmm.default and not node.kwargs:
        part = same(args[0])
        if part.target is not aten.select.int or arguments(part)[1] != 0:
            return None
        bias, args = arguments(part)[0], args[1:]
        expert = arguments(part)[2]
    elif node.target is aten.mm.default:
        expert = None
    else:
        return None
    weight = same(args[1])
    turned = weight.target not in (aten.t.default, aten.permute.default, aten.transpose.int)
    part = weight if turned else same(arguments(weight)[0])
    if part.target is not aten.select.int or arguments(part)[1] != 0 or arguments(part)[0].meta["val"].dim() != 3:
        return None
    if expert is not None and expert != arguments(part)[2]:
        return None
    return args[0], _Place(arguments(part)[0], arguments(part)[2], turned, bias)


def _first_product(hidden: Any) -> tuple[fx.Node, fx.Node, _Place] | None:
    """The product whose sums an activation is of, what it multiplies, and its weight."""
    pending, seen = [hidden], set[fx.Node]()
    while pending and len(seen) < 40:
        node = pending.pop()
        found = _linear(node) if node.target in (aten.mm.default, aten.addmm.default) else None
        if found is not None:
            return node, *found
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return None


_EQUAL: Pattern = Call((aten.eq.Scalar,), (Hole("experts"), Hole("number")))
_ONE_HOT: Pattern = one_of(
    converted(Call((aten.eq.Tensor,), (Hole("column"), Hole("count")))),
    Call((aten.eq.Tensor,), (Hole("column"), Hole("count"))),
)
_OWN_SCORES: Pattern = Call((aten.sum.dim_IntList,), (Hole("scores") * Hole("mask"), LAST, True))
