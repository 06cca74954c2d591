"""Replaces a region in the graph by a call of `gossamer::region`, or of `gossamer::chain` if it has two results.

The weight may be stored in another order of rows and columns (reorder_into_blocks.py). Then operations around the call reorder
the columns of x, of the result, and of the extra operands.
"""

import operator
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter, constant
from gossamer.backend.graph.nodes import VIEWS, arguments, same_shape
from gossamer.backend.regions.grow_region import Region
from gossamer.backend.regions.matrix_functions import Extra
from gossamer.backend.run.region_op import chain as chain_op
from gossamer.backend.run.region_op import region as region_op

aten = torch.ops.aten


def replace(region: Region, key: str, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replaces the region's outputs by a call with views around it.

    replaced  maps outputs of regions that were replaced before to their new nodes; the function adds this region's
    """
    contraction, output = region.contraction, region.output
    emit = Emitter(output, replaced)
    x = emit.now(contraction.x)
    rank = x.meta["val"].dim()
    if contraction.side == "left":
        x = emit(aten.permute.default, x, [1, 0] if rank == 2 else [0, 2, 1])
    if rank > 2:
        x = emit(aten.reshape.default, x, [-1, contraction.k])
    extras = [read_as(extra, emit.now(extra.node), emit) for extra in region.extras]
    restored: fx.Node | None = None
    if contraction.orders is not None:
        order, columns = (constant(output, each) for each in contraction.orders)
        restored = constant(output, contraction.orders[0].argsort())
        x = emit(aten.index.Tensor, x, [None, columns])
        extras = [_in_order(extra, node, order, emit) for extra, node in zip(region.extras, extras, strict=True)]
    given = [x, *contraction.weight.leaves, *extras]
    if region.second is not None:
        called = emit(chain_op, given, key)
        for number, node in enumerate((output, region.second)):
            y = emit(operator.getitem, called, number)
            if not same_shape(y, node):
                y = emit(aten.reshape.default, y, _shape(region, node, emit))
            node.replace_all_uses_with(y)
            replaced[node] = y
        return
    y = emit(region_op, given, key)
    y = y if restored is None else emit(aten.index.Tensor, y, [None, restored])
    if contraction.side == "left":
        if rank > 2:
            y = emit(aten.reshape.default, y, [*emit.sizes(contraction.x, (0, 2)), contraction.m])
        y = emit(aten.permute.default, y, [1, 0] if rank == 2 else [0, 2, 1])
    elif not same_shape(y, output):
        y = emit(aten.reshape.default, y, _shape(region, output, emit))
    output.replace_all_uses_with(y)
    replaced[output] = y


def read_as(operand: Extra, node: fx.Node, emit: Emitter) -> fx.Node:
    """Returns the node of an operand, with as many dimensions as the body's placeholder has."""
    value = node.meta["val"]
    width = value.shape[-1] if value.dim() else 1
    if operand.kind == "factor":
        return node
    sizes: dict[str, list[Any]] = {"scalar": [], "vector": [width], "column": [-1, 1], "matrix": [-1, width]}
    size = sizes[operand.kind]
    return node if value.dim() == len(size) else emit(aten.reshape.default, node, size)


def _in_order(operand: Extra, node: fx.Node, order: fx.Node, emit: Emitter) -> fx.Node:
    """Reorders an operand like the columns of the result, if it has an element or a column for each of them."""
    if operand.kind not in ("vector", "matrix"):
        return node
    return emit(aten.index.Tensor, node, [order] if operand.kind == "vector" else [None, order])


def _shape(region: Region, output: fx.Node, emit: Emitter) -> list[Any]:
    """Returns the sizes of the output as arguments: numbers, or the arguments of a view before the elementwise nodes."""
    value = output.meta["val"]
    if all(isinstance(s, int) for s in value.shape):
        return list(value.shape)
    node = output
    while node is not region.contraction.node and node.target not in VIEWS:
        node = next(n for n in node.all_input_nodes if n in region.members)
    if node.target in VIEWS:
        return list(arguments(node)[1])
    x = region.contraction.x
    return [*emit.sizes(x, tuple(range(x.meta["val"].dim() - 1))), region.contraction.m]
