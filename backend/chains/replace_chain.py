"""Putting one `gossamer::region` call where a chain was."""

from typing import Any

import torch
from torch import fx

from gossamer.backend.calls.region_op import region as region_op
from gossamer.backend.chains.find_chains import Chain
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import VIEWS, equal, same_shape
from gossamer.backend.regions.matrix_functions import Extra
from gossamer.backend.regions.replace_region import read_as

aten = torch.ops.aten


def replace_chain(chain: Chain, key: str, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replaces the chain's output by a call of the region op with views around it."""
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
    y = emit(region_op, [x, *leaves, *others], key)
    if not same_shape(y, output):
        y = emit(aten.reshape.default, y, _chain_shape(chain, emit))
    output.replace_all_uses_with(y)
    replaced[output] = y


def _operand(operand: Extra, chain: Chain, emit: Emitter) -> fx.Node:
    """An input as the chain reads it: a matrix has a row a token, a mask a row a query or a sequence."""
    node = emit.now(operand.node)
    if operand.kind == "position":
        return _by_token(node, chain, emit)
    if operand.kind == "mask":
        assert chain.attention is not None
        if node.meta["val"].dim() == 4 and not equal(node.meta["val"].shape[1], 1):
            node = emit(aten.slice.Tensor, node, 1, 0, 1)  # all heads have the same
        node = emit(aten.expand.default, node, [chain.attention.sizes[0], 1, -1, -1])
        length = node.meta["val"].shape[-1]
        columns = length if isinstance(length, int) else emit(aten.sym_size.int, node, 3)
        return emit(aten.reshape.default, node, [-1, columns])
    return read_as(operand, node, emit)


def _by_token(node: fx.Node, chain: Chain, emit: Emitter) -> fx.Node:
    """A table with a row for each position, or each position of each sequence, as a matrix with one for each token."""
    assert chain.attention is not None
    value, tokens = node.meta["val"], chain.contractions[0].x.meta["val"]
    columns = value.shape[-1]
    if not equal(value.numel() * tokens.shape[-1], tokens.numel() * columns):
        node = emit(aten.reshape.default, node, [1, -1, columns])
        node = emit(aten.expand.default, node, [emit.now(chain.attention.sizes[0]), -1, -1])
    return emit(aten.reshape.default, node, [-1, columns]) if node.meta["val"].dim() != 2 else node


def _chain_shape(chain: Chain, emit: Emitter) -> list[Any]:
    """The sizes of the output: those of the first input or of a view in the chain that has as many dimensions."""
    value, x = chain.output.meta["val"], chain.inputs[0].node
    if all(isinstance(s, int) for s in value.shape):
        return list(value.shape)
    if value.dim() == 2:
        return [-1, value.shape[-1]]
    if x.meta["val"].dim() == value.dim():
        return [*emit.sizes(x, tuple(range(value.dim() - 1))), value.shape[-1]]
    view = next(n for n in reversed(chain.members) if n.target in VIEWS and n.meta["val"].dim() == value.dim())
    sizes: Any = view.args[1]
    return [*sizes[:-1], value.shape[-1]]
