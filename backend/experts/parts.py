"""Recognises the products of one expert, whose weights are parts of one parameter, or separate tensors as in a list of modules.

    mm(%x, t(select(%weight, 0, e)))        part e of a parameter [experts, rows, columns]
    mm(%x, t(%weight_e))                    a separate weight

`weights_of` concatenates separate weights, as a value of the graph. In inference it is computed once (run/listed_experts.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.products import Pieces
from gossamer.backend.experts.routes import in_order
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.layout import path
from gossamer.backend.graph.nodes import arguments, equal_sizes, same

aten = torch.ops.aten

_MOST = 40
"""Most nodes between the products of an expert that `first_parts` visits."""


@dataclass(frozen=True)
class Part:
    """A linear layer of one expert.

    node    the result
    x       the operand
    weight  [rows, columns], or [columns, rows] if `turned`
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    turned: bool
    bias: fx.Node | None


def part_at(result: Any) -> Part | None:
    """Returns the linear layer whose result a value has, else None."""
    node = whole(result)
    args: Any = arguments(node)
    bias: fx.Node | None = None
    if node.target is aten.addmm.default and not node.kwargs:
        bias, args = same(args[0]), args[1:]
        if not equal_sizes(bias.meta["val"].shape, node.meta["val"].shape[1:]):
            return None
    elif node.target is not aten.mm.default:
        return None
    weight = same(args[1])
    turned = weight.target not in (aten.t.default, aten.permute.default, aten.transpose.int)
    return Part(node, args[0], weight if turned else same(arguments(weight)[0]), turned, bias)


def first_parts(hidden: fx.Node) -> list[Part]:
    """Returns the linear layers that a value between two products is computed from, in the order in which it reads them."""
    pending, seen, found = [hidden], set[fx.Node](), list[Part]()
    while pending and len(seen) < _MOST:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        part = part_at(node) if node.target in (aten.mm.default, aten.addmm.default) else None
        if part is not None:
            found.append(part)
        else:
            pending += reversed(node.all_input_nodes)
    return found


def whole(node: Any) -> fx.Node:
    """Returns a value before views that keep all of its rows, in their order."""
    steps = path(node)
    for number, before in enumerate(steps):
        if equal_sizes(before.meta["val"].shape[-1:], node.meta["val"].shape[-1:]) and in_order(steps[number:]):
            return before
    return steps[-1]


def weights_of(parts: Sequence[Sequence[Part]], emit: Emitter) -> tuple[fx.Node, fx.Node | None, Pieces] | None:
    """Returns weights [experts, rows, columns], biases [experts, rows], and the pieces of all experts from the parts of each.

    Pieces are empty where the graph has the weights as one value. Returns None if the parts differ in shape or type.
    """
    each = [part for own in parts for part in own]
    first, several = each[0], len(parts[0])
    shape = first.weight.meta["val"].shape
    alike = all(
        part.turned == first.turned
        and (part.bias is None) == (first.bias is None)
        and equal_sizes(part.weight.meta["val"].shape, shape)
        and part.weight.meta["val"].dtype == first.weight.meta["val"].dtype
        for part in each
    )
    if not alike or len(shape) != 2 or (first.turned and several > 1):
        return None
    weights, biases = [part.weight for part in each], [part.bias for part in each if part.bias is not None]
    weight, bias = _parameter(weights), _parameter(biases) if biases else None
    pieces = Pieces(() if weight is not None else tuple(weights), () if bias is not None else tuple(biases))
    if weight is None:
        weight = _stacked(weights, several, emit)
    if bias is None and biases:
        bias = _stacked(biases, several, emit)
    return weight, bias, pieces


def _parameter(pieces: Sequence[fx.Node]) -> fx.Node | None:
    """Returns the value whose parts, all of them and in order, these nodes are; else None."""
    sources = {arguments(each)[0] if each.target is aten.select.int else None for each in pieces}
    (source, *others) = sources
    if source is None or others or source.meta["val"].shape[0] != len(pieces):
        return None
    return source if [arguments(each)[1:] for each in pieces] == [(0, number) for number in range(len(pieces))] else None


def _stacked(pieces: Sequence[fx.Node], several: int, emit: Emitter) -> fx.Node:
    """Concatenates pieces, of which `several` belong to each expert."""
    size, *others = pieces[0].meta["val"].shape
    joined = emit(aten.cat.default, list(pieces))
    return emit(aten.view.default, joined, [len(pieces) // several, several * size, *others])
