"""Putting one `gossamer::region` call where a region was."""

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gossamer.backend.bodies import Extra
from gossamer.backend.chains import Chain
from gossamer.backend.elementwise import VIEWS
from gossamer.backend.region_op import region as region_op
from gossamer.backend.regions import Region

aten = torch.ops.aten


def replace(region: Region, key: str, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replaces the region's output by a call of the region op with views around it.

    `replaced` maps the outputs of the regions that were replaced before to their new nodes, and is added to.
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
    y = emit(region_op, [x, *contraction.weight.leaves, *extras], key)
    if contraction.side == "left":
        if rank > 2:
            y = emit(aten.reshape.default, y, [*emit.sizes(contraction.x, (0, 2)), contraction.m])
        y = emit(aten.permute.default, y, [1, 0] if rank == 2 else [0, 2, 1])
    elif not _same_shape(y, output):
        y = emit(aten.reshape.default, y, _shape(region, output, emit))
    output.replace_all_uses_with(y)
    replaced[output] = y


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
    if not _same_shape(y, output):
        y = emit(aten.reshape.default, y, _chain_shape(chain, emit))
    output.replace_all_uses_with(y)
    replaced[output] = y


def _operand(operand: Extra, chain: Chain, emit: "Emitter") -> fx.Node:
    """An input as the chain reads it: a matrix has a row a token, a mask a row a query or a sequence."""
    node = emit.now(operand.node)
    if operand.kind == "position":
        return _by_token(node, chain, emit)
    if operand.kind == "mask":
        assert chain.attention is not None
        if node.meta["val"].dim() == 4 and not statically_known_true(node.meta["val"].shape[1] == 1):
            node = emit(aten.slice.Tensor, node, 1, 0, 1)  # all heads have the same
        node = emit(aten.expand.default, node, [chain.attention.sizes[0], 1, -1, -1])
        length = node.meta["val"].shape[-1]
        columns = length if isinstance(length, int) else emit(aten.sym_size.int, node, 3)
        return emit(aten.reshape.default, node, [-1, columns])
    return read_as(operand, node, emit)


def _by_token(node: fx.Node, chain: Chain, emit: "Emitter") -> fx.Node:
    """A table with a row for each position, or each position of each sequence, as a matrix with one for each token."""
    assert chain.attention is not None
    value, tokens = node.meta["val"], chain.contractions[0].x.meta["val"]
    columns = value.shape[-1]
    if not statically_known_true(value.numel() * tokens.shape[-1] == tokens.numel() * columns):
        node = emit(aten.reshape.default, node, [1, -1, columns])
        node = emit(aten.expand.default, node, [emit.now(chain.attention.sizes[0]), -1, -1])
    return emit(aten.reshape.default, node, [-1, columns]) if node.meta["val"].dim() != 2 else node


def read_as(operand: Extra, node: fx.Node, emit: "Emitter") -> fx.Node:
    """The node of an operand in as many dimensions as a body reads it in."""
    value = node.meta["val"]
    width = value.shape[-1] if value.dim() else 1
    sizes: dict[str, list[Any]] = {"scalar": [], "vector": [width], "column": [-1, 1], "matrix": [-1, width]}
    size = sizes[operand.kind]
    return node if value.dim() == len(size) else emit(aten.reshape.default, node, size)


def _chain_shape(chain: Chain, emit: "Emitter") -> list[Any]:
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


_OWN = ("val", "tensor_meta", "original_aten", "eager_input_vals")  # metadata that belongs to one call


class Emitter:
    """Adds nodes right before one node, with its provenance and their own fake values."""

    def __init__(self, before: fx.Node, replaced: dict[fx.Node, fx.Node]) -> None:
        self._before, self._replaced = before, replaced
        self._mode = detect_fake_mode([before.meta["val"]])

    def __call__(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(target, args, options)
        node.meta = {k: v for k, v in self._before.meta.items() if k not in _OWN}
        with self._mode:  # type: ignore[union-attr]
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **options)
        return node

    def now(self, node: Any) -> Any:
        """The node that computes this value now; a number stays what it is."""
        return self._replaced.get(node, node)

    def sizes(self, node: fx.Node, axes: tuple[int, ...]) -> list[int | fx.Node]:
        """Some sizes of a value: numbers where they are static."""
        node = self.now(node)
        shape = node.meta["val"].shape
        return [s if isinstance(s := shape[a], int) else self(aten.sym_size.int, node, a) for a in axes]


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"].shape, b.meta["val"].shape
    return len(x) == len(y) and all(statically_known_true(p == q) for p, q in zip(x, y, strict=True))


def _shape(region: Region, output: fx.Node, emit: Emitter) -> list[Any]:
    """The sizes of the output, as the graph spells them: elementwise nodes have the shape of a view before them."""
    value = output.meta["val"]
    if all(isinstance(s, int) for s in value.shape):
        return list(value.shape)
    node = output
    while node is not region.contraction.node and node.target not in VIEWS:
        node = next(n for n in node.all_input_nodes if n in region.members)
    if node.target in VIEWS:
        return list(node.args[1])  # type: ignore[arg-type]
    x = region.contraction.x
    return [*emit.sizes(x, tuple(range(x.meta["val"].dim() - 1))), region.contraction.m]
