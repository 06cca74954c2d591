"""Replaces the nodes of a chain by one call of its kernel, `gossamer::region` or `gossamer::chain`."""

import operator
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import fx

from gossamer.backend.chains.find_chains import Chain, Stage
from gossamer.backend.chains.heads import PerHead
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import VIEWS, equal, equal_sizes, same_shape
from gossamer.backend.regions.matrix_functions import Extra
from gossamer.backend.regions.replace_region import read_as
from gossamer.backend.run.region_op import chain as chain_op
from gossamer.backend.run.region_op import region as region_op

aten = torch.ops.aten


def replace_chain(chain: Chain, key: str, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replaces the results of a chain by a call, with views around it. `key` is that of the built chain.

    `replaced` maps nodes that earlier calls replaced to their replacements; this call adds its own.
    """
    output = chain.output
    emit = Emitter(output, replaced)
    x = emit.now(chain.inputs[0].node)
    width = x.meta["val"].shape[-1]
    if chain.attention is not None:
        batch, length = map(emit.now, chain.attention.sizes)
        sizes = (length, batch) if chain.inputs[0].node in chain.by_position else (batch, length)
        x = emit(aten.reshape.default, x, [*sizes, width])
    elif x.meta["val"].dim() > 2:
        x = emit(aten.reshape.default, x, [-1, width])
    leaves = [leaf for contraction in chain.contractions for leaf in contraction.weight.leaves]
    others = [_operand(i, chain, emit) for i in chain.inputs[1:]]
    if len(chain.results) > 1:
        called = emit(chain_op, [x, *leaves, *others], key)
        results = [emit(operator.getitem, called, number) for number in range(len(chain.results))]
    else:
        results = [emit(region_op, [x, *leaves, *others], key)]
    given = {s.output: _restored(y, s, chain, emit) for y, s in zip(results, chain.results, strict=True)}
    inside, delivered = set(chain.members), set[fx.Node]()
    for views in chain.leaving:
        node, y = views[-1], given[views[0]]
        for before, view in pairwise(views):
            y = _viewed(view, before, y, emit)
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, y)
        replaced[node] = y
        delivered.add(y)
    _move_behind(output, delivered)


def _viewed(view: fx.Node, before: fx.Node, y: fx.Node, emit: Emitter) -> fx.Node:
    """Applies `view`, a view of `before`, to `y`. If `view` is a part of a split, splits `y`, too."""
    whole: Any = view.args[0]
    if view.target is operator.getitem and whole is not before:
        return emit(operator.getitem, _viewed(whole, before, y, emit), view.args[1])
    return emit(view.target, *fx.map_arg(view.args, partial(_instead, before, y)), **view.kwargs)


def _instead(old: fx.Node, new: fx.Node, argument: fx.Node) -> fx.Node:
    return new if argument is old else argument


def _move_behind(output: fx.Node, delivered: set[fx.Node]) -> None:
    """Moves users of the results to the last node of the chain, because the chain is called there."""
    before = list(takewhile(lambda node: node is not output, output.graph.nodes))
    for node in before:
        if not delivered.isdisjoint(node.all_input_nodes):
            output.prepend(node)
            delivered.add(node)


def _restored(y: fx.Node, stage: Stage, chain: Chain, emit: Emitter) -> fx.Node:
    """Returns a result, a matrix with one row for each token, in the shape of the node that it replaces."""
    if isinstance(stage.step, PerHead):
        turned = stage.step
        assert chain.attention is not None
        batch, length = map(emit.now, chain.attention.sizes)
        outer = (length, batch) if turned.heads.by_position else (batch, length)
        y = emit(aten.reshape.default, y, [*outer, turned.heads.count, turned.size])
        # roles: which dimensions of the node are batch, heads, positions and columns
        lies = {turned.roles[0]: int(turned.heads.by_position), turned.roles[2]: int(not turned.heads.by_position)}
        lies |= {turned.roles[1]: 2, turned.roles[3]: 3}
        return emit(aten.permute.default, y, [lies[dim] for dim in range(4)])
    return y if same_shape(y, stage.output) else emit(aten.reshape.default, y, _shape(stage.output, chain, emit))


def _operand(operand: Extra, chain: Chain, emit: Emitter) -> fx.Node:
    """Returns an input as the kernel reads it: a matrix with one row a token, a mask with one row a query or a sequence."""
    node = emit.now(operand.node)
    if operand.kind == "position":
        return _by_token(node, chain, emit)
    if operand.kind == "mask":
        assert chain.attention is not None
        if node.meta["val"].dim() == 4 and not equal(node.meta["val"].shape[1], 1):
            node = emit(aten.slice.Tensor, node, 1, 0, 1)  # the heads share a mask
        if chain.attention.key_mask:
            node = _row(node, emit)  # the queries share a row
        node = emit(aten.expand.default, node, [chain.attention.sizes[0], 1, -1, -1])
        length = node.meta["val"].shape[-1]
        columns = length if isinstance(length, int) else emit(aten.sym_size.int, node, 3)
        return emit(aten.reshape.default, node, [-1, columns])
    return read_as(operand, node, emit)


def _row(mask: fx.Node, emit: Emitter) -> fx.Node:
    """Returns the row of a mask for the first query. If an elementwise op makes the mask, it makes this row only."""

    def first(node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        many = isinstance(value, torch.Tensor) and value.dim() > 1 and not equal(value.shape[-2], 1)
        return emit(aten.slice.Tensor, node, -2, 0, 1) if many else node

    if mask.op != "call_function" or torch.Tag.pointwise not in getattr(mask.target, "tags", ()):
        return first(mask)
    args, kwargs = fx.map_arg((mask.args, dict(mask.kwargs)), first)
    return emit(mask.target, *args, **kwargs)


def _by_token(node: fx.Node, chain: Chain, emit: Emitter) -> fx.Node:
    """Returns a table as a matrix with one row for each token. It has a row a position, perhaps for each sequence."""
    assert chain.attention is not None
    value, tokens = node.meta["val"], chain.contractions[0].x.meta["val"]
    columns = value.shape[-1]
    if not equal(value.numel() * tokens.shape[-1], tokens.numel() * columns):
        node = emit(aten.reshape.default, node, [1, -1, columns])
        node = emit(aten.expand.default, node, [emit.now(chain.attention.sizes[0]), -1, -1])
    return emit(aten.reshape.default, node, [-1, columns]) if node.meta["val"].dim() != 2 else node


def _shape(output: fx.Node, chain: Chain, emit: Emitter) -> list[Any]:
    """Returns the shape of an output. Dynamic sizes come from an input or a view in the chain that has them, too."""
    value = output.meta["val"]
    if all(isinstance(s, int) for s in value.shape):
        return list(value.shape)
    if value.dim() == 2:
        return [-1, value.shape[-1]]

    def has_them(node: fx.Node) -> bool:
        return equal_sizes(node.meta["val"].shape[:-1], value.shape[:-1])

    given = next((each.node for each in chain.inputs if has_them(each.node)), None)
    if given is not None:
        return [*emit.sizes(given, tuple(range(value.dim() - 1))), value.shape[-1]]
    view = next((n for n in reversed(chain.members) if n.target in VIEWS and has_them(n)), None)
    sizes: Any = value.shape if view is None else view.args[1]
    return [*sizes[:-1], value.shape[-1]]
