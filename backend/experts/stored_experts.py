"""Rewrites products with stored nonzeros of experts' weights as grouped products, which the other files of this room recognise.

    %y = gossamer::stored_product(%x, %ends, %pos, %crd, %values, ...)
      →
    %w = gossamer::einsum([%pos, %crd, %values])               all elements [experts, rows, columns]
    %y = gossamer::grouped_rows(%x, permute(%w), %ends)

Each expert becomes a region, which packs the weight of this expert. Products that do not become regions are restored
afterwards. So no product ever runs on all elements.
"""

from collections.abc import Container
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.einsum_calls import call_at
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.layout import path
from gossamer.backend.graph.nodes import arguments, in_training, same
from gossamer.dialects.format import Format
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.experts.stored_products import LINES  # its module defines the operations

aten, ours = torch.ops.aten, torch.ops.gossamer


class StoredProducts:
    """The stored products of one graph in inference. Rewrites them as grouped products, and remembers the originals."""

    def __init__(self, graph: fx.Graph, statics: Container[fx.Node]) -> None:
        found = [] if in_training(graph) else graph.find_nodes(op="call_function", target=ours.stored_product.default)
        self._was: dict[fx.Node, fx.Node] = {}
        for node in found:
            given = arguments(node)
            x, columns = given[0], given[6]
            arrays = [same(each) for each in given[2:5]]
            if x.meta["val"].is_cpu and isinstance(columns, int) and all(each in statics for each in arrays):
                self._was[_as_grouped(node, arrays)] = node

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._was

    def put_back(self) -> None:
        """Restores the products that did not become regions."""
        for node, was in self._was.items():
            if not node._erased:
                node.replace_all_uses_with(was)


def _as_grouped(node: fx.Node, arrays: list[fx.Node]) -> fx.Node:
    given = arguments(node)
    x, ends, rows, columns, turned = (given[place] for place in (0, 1, 5, 6, 7))
    emit = Emitter(node)
    count = ends.meta["val"].shape[0]
    spec = Spec((Operand("emk", _format(arrays)),), Operand("emk"))
    weight = emit(ours.einsum.default, arrays, [count, rows, columns], str(spec))
    made = emit(ours.grouped_rows.default, x, weight if turned else emit(aten.permute.default, weight, [0, 2, 1]), ends)
    node.replace_all_uses_with(made)
    return made


def _format(arrays: list[fx.Node]) -> Format:
    return LINES.with_widths(*(8 * each.meta["val"].dtype.itemsize for each in arrays[:2]))


def stored_sizes(weights: Any) -> tuple[int, int, int] | None:
    """Returns the sizes [experts, rows, columns] of stored weights, also if the value has their transposes; else None."""
    call = call_at(path(weights)[0], ours.einsum.default)
    if call is None or len(call.operands) != 1 or call.operands[0].letters != "emk":
        return None
    experts, rows, columns = call.operands[0].sizes
    return experts, rows, columns


def expert_of(weights: fx.Node, number: int) -> tuple[Any, ...]:
    """Returns the operation that selects the weight of one expert, and its arguments."""
    sizes = stored_sizes(weights)
    if sizes is None:
        return aten.select.int, weights, 0, number
    whole = path(weights)
    return ours.stored_expert.default, *arguments(whole[0])[0], number, sizes[0], sizes[2], len(whole) > 1


def stored_density(weights: fx.Node) -> float | None:
    """Returns the density of stored weights; None for other values."""
    sizes = stored_sizes(weights)
    if sizes is None:
        return None
    values: Any = arguments(path(weights)[0])[0][-1]
    return int(values.meta["val"].shape[0]) / max(1, prod(sizes))
