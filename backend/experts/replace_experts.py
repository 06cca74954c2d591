"""Replaces layers and products of experts by operations, and their gradients by the gradients of these.

gossamer::routed_mlp(%x, %experts, %scores, %gate_up, ..., %down, ..., "silu", "halves", keep)     for a whole layer
gossamer::listed_mlp(%x, %experts, %scores, [%w1_0, %w3_0, %w2_0, ...], ..., "silu", "halves", ...)     its weights in a list
gossamer::routed_product(%rows, %ids, %weight, None, %bias)                                       for a single product
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.experts.layers import Layer
from gossamer.backend.experts.products import Product
from gossamer.backend.experts.routes import from_the_end
from gossamer.backend.graph.backward_part import BackwardPart, JointGraph, stops_gradient
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from, cut
from gossamer.backend.graph.inputs import Static, noticed
from gossamer.backend.graph.nodes import ancestors, between, equal, equal_sizes
from gossamer.backend.graph.refused import Refused
from gossamer.backend.report.options import Verify
from gossamer.backend.run.listed_experts import listed_experts, listed_mlp
from gossamer.backend.run.region_op import region
from gossamer.sparsity.experts import routed_mlp as _  # noqa: F401  # defines the operations

aten, prims = torch.ops.aten, torch.ops.prims
mixture, mixture_backward = torch.ops.gossamer.routed_mlp.default, torch.ops.gossamer.routed_mlp_backward.default
routed_product, routed_outer = torch.ops.gossamer.routed_product.default, torch.ops.gossamer.routed_outer.default
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default}


@dataclass(frozen=True)
class Listed:
    """The computation of a layer's weights from pieces, in inference.

    leaves  the tensors and the sizes that it reads
    key     the key by which the operation finds the computation
    """

    leaves: tuple[list[fx.Node], list[fx.Node]]
    key: str


def listed(layer: Layer, statics: Mapping[fx.Node, Static], verify: Verify) -> Listed | None:
    """Returns the computation of a layer's weights from pieces; None if the graph has them as one value.

    Raises Refused if the weights may change at every call.
    """
    if not (layer.up.pieces or layer.down.pieces):
        return None
    emit, products = Emitter(layer.node), (layer.up, layer.down)
    values = [each for product in products for each in (_stored(emit, product), product.bias)]
    known = computed_from(layer.node.graph, statics)
    if not all(each is None or each in known for each in values):
        raise Refused("the weights of its experts may be others at every call")
    expression = cut(values, statics)
    key = listed_experts(expression, noticed(expression.leaves, verify))
    return Listed((list(expression.leaves), list(expression.numbers)), key)


def layer_backward(layer: Layer, joint: JointGraph | None) -> BackwardPart | None:
    """Returns the part of a joint graph that computes a layer's gradients; None in inference. Raises Refused."""
    if joint is None:
        return None
    if not layer.gate.same_slopes:
        raise Refused(f"its activation has other gradients than {layer.gate.activation}")
    inputs = list(dict.fromkeys(piece for leaf in _leaves(layer) for piece in leaf))
    if layer.added is not None:
        inputs.append(layer.added)
    return _part(joint, inputs, layer.routing.experts, layer.node)


def _leaves(layer: Layer) -> list[tuple[fx.Node, ...]]:
    """Returns the values that may have gradients, in the operation's order: each operand, or the pieces that it consists of."""
    found: list[tuple[fx.Node, ...]] = [(layer.x,), (layer.scores,)]
    for product in (layer.up, layer.down):
        found.append(product.pieces.weights or (product.weight,))
        found.append(product.pieces.biases or (() if product.bias is None else (product.bias,)))
    return found


def put_layer(layer: Layer, backward: BackwardPart | None, how: Listed | None = None) -> None:
    """Replaces a layer by an operation. With `how`, the operation computes the weights from pieces when these are new."""
    emit = Emitter(layer.node)
    (x, experts, scores), exists = _operands(emit, layer)
    gate, trains = [layer.gate.activation, layer.gate.layout], backward is not None and backward.upstream is not None
    if how is not None:
        y = emit(listed_mlp, x, experts, scores, *how.leaves, *gate, layer.down.outputs, how.key)
    else:
        weights = [_stored(emit, product) for product in (layer.up, layer.down)]
        given = [x, experts, scores, weights[0], None, layer.up.bias, weights[1], None, layer.down.bias, *gate]
        made = emit(mixture, *given, trains)
        y = emit(operator.getitem, made, 0)
    y = _result(emit, layer, y)
    if trains:
        assert backward is not None
        _put_gradients(layer, backward, given, emit(operator.getitem, made, 1), exists)
    layer.node.replace_all_uses_with(y)


def put_region(layer: Layer, key: str, leaves: Sequence[fx.Node]) -> None:
    """Replaces a layer by the region with this key (see run/pruned_mixture.py)."""
    emit = Emitter(layer.node)
    given = _operands(emit, layer)[0]
    layer.node.replace_all_uses_with(_result(emit, layer, emit(region, [*given, *leaves], key)))


def _operands(emit: Emitter, layer: Layer) -> tuple[list[fx.Node], fx.Node | None]:
    """Returns x [tokens, columns], experts and scores [tokens, top]; and which of the experts exist, None if all do."""
    _keep_sizes(layer)
    experts = _matrix(emit, layer.routing.experts)
    x, scores = _tokens(emit, layer), emit(aten.reshape.default, layer.scores, list(experts.meta["val"].shape))
    exists, count = None, layer.up.experts
    if layer.up.gathered or layer.down.gathered:
        experts = _from_the_end(emit, layer.up, experts)
    elif not layer.routing.all_exist(count):  # such experts add nothing to their tokens
        exists = emit(aten.logical_and.default, emit(aten.ge.Scalar, experts, 0), emit(aten.lt.Scalar, experts, count))
        experts, scores = _where(emit, exists, experts), _where(emit, exists, scores)
        x = _where(emit, emit(aten.any.dim, exists, 1, True), x)  # a token without experts may have any numbers
    return [x, experts, scores], exists


def _from_the_end(emit: Emitter, product: Product, ids: fx.Node) -> fx.Node:
    """Returns the ids of gathered weights, of which negative ones count from the end, as numbers from 0 on."""
    if product.routing is not None and product.routing.all_exist(product.experts):
        return ids
    return from_the_end(emit, ids, product.experts)


def _result(emit: Emitter, layer: Layer, y: fx.Node) -> fx.Node:
    """Returns the result of an operation in the shape and type of the layer's result."""
    y = _as(emit, y, layer.node)
    return y if layer.added is None else emit(aten.add.Tensor, layer.added, y)


def _tokens(emit: Emitter, layer: Layer) -> fx.Node:
    """Returns the tokens of a layer as a matrix."""
    x = layer.x
    return x if x.meta["val"].dim() == 2 else emit(aten.reshape.default, x, [-1, x.meta["val"].shape[-1]])


def _keep_sizes(layer: Layer) -> None:
    """Computes sizes that are read from values inside of the layer from the sizes of the experts, so that the values can go."""
    inputs = [layer.x, layer.routing.experts, layer.scores]
    for node in between(inputs, layer.node):
        for user in list(node.users):
            if user.target is aten.sym_size.int and equal(user.meta["val"], layer.routing.pairs):
                emit = Emitter(user)
                tokens = emit(aten.sym_size.int, layer.routing.experts, 0)
                user.replace_all_uses_with(emit(operator.mul, tokens, layer.routing.top))


def _where(emit: Emitter, condition: fx.Node, value: fx.Node) -> fx.Node:
    """Returns a value where a condition is true, zeros elsewhere."""
    return emit(aten.where.self, condition, value, emit(aten.full.default, [], 0.0, dtype=value.meta["val"].dtype))


def _put_gradients(layer: Layer, backward: BackwardPart, given: list[Any], kept: fx.Node, exists: fx.Node | None) -> None:
    emit = Emitter(_first(backward))
    leaves = _leaves(layer)
    wanted = [any(backward.gradients[piece] for piece in leaf) for leaf in leaves]
    if layer.added is not None and backward.gradients[layer.added]:
        _put(emit, backward.gradients[layer.added], _as(emit, backward.upstream, layer.added))
    if not any(wanted):
        return
    gradient = emit(aten.reshape.default, backward.upstream, [-1, layer.down.outputs])
    gradient = _of_type(emit, gradient, layer.x.meta["val"].dtype)
    made = emit(mixture_backward, gradient, kept, *given, wanted)
    number = 0
    for leaf, want, product in zip(leaves, wanted, (None, None, layer.up, None, layer.down, None), strict=True):
        if not want:
            continue
        value = emit(operator.getitem, made, number)
        number += 1
        if leaf == (layer.scores,) and exists is not None:
            value = _where(emit, exists, value)
        if product is not None and product.turned:
            value = emit(aten.permute.default, value, [0, 2, 1])
        for piece, own in _cut(emit, value, leaf).items():
            if backward.gradients[piece]:
                _put(emit, backward.gradients[piece], own)


def _cut(emit: Emitter, value: fx.Node, pieces: tuple[fx.Node, ...]) -> dict[fx.Node, fx.Node]:
    """Returns the gradient of each piece of an operand. A piece that several experts use gets the sum."""
    if len(pieces) == 1:
        return {pieces[0]: value}
    each = emit(aten.reshape.default, value, [len(pieces), -1, *value.meta["val"].shape[2:]])
    found = dict[fx.Node, fx.Node]()
    for number, piece in enumerate(pieces):
        own = emit(aten.select.int, each, 0, number)
        found[piece] = emit(aten.add.Tensor, found[piece], own) if piece in found else own
    return found


def _put(emit: Emitter, places: Sequence[fx.Node], value: fx.Node) -> None:
    """Replaces the first of the values that add up to an operand's gradient by the gradient, and the others by zeros."""
    first, *others = places
    first.replace_all_uses_with(_as(emit, value, first))
    for other in others:
        other.replace_all_uses_with(emit.zeros(other))


def _first(backward: BackwardPart) -> fx.Node:
    places = {node for found in backward.gradients.values() for node in found}
    return next(node for node in next(iter(places)).graph.nodes if node in places)


def product_backward(product: Product, joint: JointGraph | None) -> BackwardPart | None:
    """Returns the part of a joint graph that computes a product's gradients; None in inference. Raises Refused."""
    if joint is None:
        return None
    chosen = product.ends if product.routing is None else product.routing.experts
    assert chosen is not None
    inputs = [each for each in (product.source, product.weight, product.bias) if each is not None]
    return _part(joint, inputs, chosen, product.node)


def _part(joint: JointGraph, inputs: list[fx.Node], chosen: fx.Node, output: fx.Node) -> BackwardPart:
    """Returns the part of a joint graph that computes the gradients of `inputs`. Raises Refused if a gradient stops within."""
    nodes = _on_the_way(inputs, chosen, output)
    part = joint.part(nodes, inputs, output)
    silent = [node for node in nodes if node.target in _PRODUCTS and not joint.backward_of(node)]
    before = ancestors(silent, lambda node: node is chosen)
    stops = any(map(stops_gradient, nodes)) or any(part.gradients.get(node) for node in before)
    if stops:
        raise Refused("a gradient stops within it")
    return part


def _on_the_way(inputs: list[fx.Node], chosen: fx.Node, output: fx.Node) -> list[fx.Node]:
    """Returns the nodes on the way to the output that are computed from `inputs`, the values with gradients.

    Nodes that only sort rows are not among them; they may serve several products.
    """
    found, reached = list[fx.Node](), set(inputs)
    for node in between([*inputs, chosen], output):
        if not reached.isdisjoint(node.all_input_nodes):
            found.append(node)
            reached.add(node)
    return found


def put_product(product: Product, backward: BackwardPart | None) -> None:
    """Replaces a product whose rows lie one after the other, and its gradients."""
    emit = Emitter(product.node)
    rows = emit(aten.reshape.default, product.source, [-1, product.columns])
    ids, hit = _ids(emit, product)
    weight = _stored(emit, product)
    y = emit(routed_product, rows, ids, weight, None, product.bias)
    if hit is not None:
        y = _where(emit, hit, y)
    y = _as(emit, y, product.node)
    if backward is not None and backward.upstream is not None:
        _put_product_gradients(product, backward, rows, ids, hit, weight)
    product.node.replace_all_uses_with(y)


def _ids(emit: Emitter, product: Product) -> tuple[fx.Node, fx.Node | None]:
    """Returns the experts of the rows, [rows, 1] or [tokens, top]; and which rows have an expert, None if all do."""
    if product.routing is not None and product.per_token:
        return _from_the_end(emit, product, _matrix(emit, product.routing.experts)), None
    if product.ends is None:
        assert product.routing is not None
        return _from_the_end(emit, product, emit(aten.reshape.default, product.routing.experts, [-1, 1])), None
    (count,) = emit.sizes(product.rows, (0,))
    ends = product.ends.meta["val"]
    places = emit(aten.arange.start_step, 0, count, 1, dtype=ends.dtype, device=ends.device)
    ids = emit(aten.bucketize.Tensor, places, product.ends, right=True)
    ids = emit(aten.unsqueeze.default, ids, 1)
    hit = emit(aten.unsqueeze.default, emit(aten.lt.Scalar, ids, product.experts), 2)
    return emit(aten.clamp_max.default, ids, product.experts - 1), hit


def _put_product_gradients(
    product: Product, backward: BackwardPart, rows: fx.Node, ids: fx.Node, hit: fx.Node | None, weight: fx.Node
) -> None:
    emit = Emitter(_first(backward))
    top = product.routing.top if product.routing is not None and product.per_token else 1
    gradient = emit(aten.reshape.default, backward.upstream, [-1, top, product.outputs])
    if hit is not None:
        gradient = _where(emit, hit, gradient)
    gradient = _of_type(emit, gradient, rows.meta["val"].dtype)
    if places := backward.gradients[product.source]:
        turned = emit(aten.permute.default, weight, [0, 2, 1])
        _put(emit, places, emit(aten.sum.dim_IntList, emit(routed_product, gradient, ids, turned, None, None), [1]))
    if places := backward.gradients[product.weight]:
        if hit is not None:  # rows without an expert may have any numbers
            rows = _where(emit, emit(aten.squeeze.dim, hit, 2), rows)
        value = emit(routed_outer, gradient, rows, ids, product.experts)
        _put(emit, places, emit(aten.permute.default, value, [0, 2, 1]) if product.turned else value)
    if product.bias is not None and (places := backward.gradients[product.bias]):
        zeros = emit.zeros(product.bias)
        flat, each = emit(aten.reshape.default, ids, [-1]), emit(aten.reshape.default, gradient, [-1, product.outputs])
        _put(emit, places, emit(aten.index_put.default, zeros, [flat], each, True))


def _stored(emit: Emitter, product: Product) -> fx.Node:
    """Returns the weight as [experts, rows, columns]."""
    return emit(aten.permute.default, product.weight, [0, 2, 1]) if product.turned else product.weight


def _matrix(emit: Emitter, node: fx.Node) -> fx.Node:
    """Returns experts [tokens] as [tokens, 1]; a matrix as it is."""
    return emit(aten.unsqueeze.default, node, 1) if node.meta["val"].dim() == 1 else node


def _as(emit: Emitter, value: Any, node: fx.Node) -> fx.Node:
    """Returns a value in the shape and the type of another."""
    shape = node.meta["val"].shape
    if not equal_sizes(value.meta["val"].shape, shape):
        value = emit(aten.reshape.default, value, list(shape))
    made: fx.Node = _of_type(emit, value, node.meta["val"].dtype)
    return made


def _of_type(emit: Emitter, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    return value if value.meta["val"].dtype == dtype else emit(prims.convert_element_type.default, value, dtype)


def check(product: Product) -> None:
    """Raises Refused for devices and types that the operations do not support."""
    x, weight = product.source.meta["val"], product.weight.meta["val"]
    if not x.is_cpu:
        raise Refused("experts are one operation on CPUs only")
    if not (weight.dtype == x.dtype and weight.is_floating_point()):
        raise Refused(f"tokens of {x.dtype} and weights of {weight.dtype}")
