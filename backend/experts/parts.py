"""The products of one expert, whose weights are parts of a parameter or tensors of their own, as those of a list of modules.

    mm(%x, t(select(%weight, 0, e)))        part e of a parameter [experts, rows, columns]
    mm(%x, t(%weight_e))                    a weight of its own

Where the weights are tensors of their own, `weights_of` puts them behind one another. That is a value of the graph, which in
inference is computed once (run/listed_experts.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.products import Pieces
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.layout import path
from gossamer.backend.graph.nodes import arguments, equal_sizes, same

aten = torch.ops.aten

_MOST = 40
"""Nodes between the products of an expert that are looked at."""


@dataclass(frozen=True)
class Part:
    """A linear layer of one expert.

    node    the result
    x       what is multiplied
    weight  [rows, columns], or [columns, rows] where it is `turned`
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    turned: bool
    bias: fx.Node | None


def part_at(result: Any) -> Part | None:
    """The linear layer whose result a value has."""
    node = whole(result)
    args: Any = arguments(node)
    bias: fx.Node | None = None
    if node.target is aten.addmm.default and not node.kwargs:
        bias, args = same(args[0]), args[1:]
        if bias.meta["val"].dim() != 1:
            return None
    elif node.target is not aten.mm.default:
        return None
    weight = same(args[1])
    turned = weight.target not in (aten.t.default, aten.permute.default, aten.transpose.int)
    return Part(node, args[0], weight if turned else same(arguments(weight)[0]), turned, bias)


def first_parts(hidden: fx.Node) -> list[Part]:
    """The linear layers that a value between two products is computed of, in the order in which it reads them."""
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
    """A value before views that keep its rows."""
    while (before := path(node)[0]) is not node and equal_sizes(before.meta["val"].shape[-1:], node.meta["val"].shape[-1:]):
        node = before
    return same(node)


def weights_of(parts: Sequence[Sequence[Part]], emit: Emitter) -> tuple[fx.Node, fx.Node | None, Pieces] | None:
    """The weights and biases of all experts, whose parts are given, as [experts, rows, columns] and [experts, rows]; and what
    they were put together from, nothing where the graph has them so."""
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
    """What these are all parts of, in their order."""
    sources = {arguments(each)[0] if each.target is aten.select.int else None for each in pieces}
    (source, *others) = sources
    if source is None or others or source.meta["val"].shape[0] != len(pieces):
        return None
    return source if [arguments(each)[1:] for each in pieces] == [(0, number) for number in range(len(pieces))] else None


def _stacked(pieces: Sequence[fx.Node], several: int, emit: Emitter) -> fx.Node:
    """One behind the other, so many to an expert."""
    size, *others = pieces[0].meta["val"].shape
    joined = emit(aten.cat.default, list(pieces))
    return emit(aten.view.default, joined, [len(pieces) // several, several * size, *others])
