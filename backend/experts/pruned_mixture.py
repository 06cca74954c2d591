"""Replaces a whole mixture of experts with pruned weights by one region: products, activation, and the sum over the experts.

    %sums = grouped_mm(%sorted, transpose(%gate_up), %ends)
    %each = grouped_mm(silu(%gate) * %up, ...)                 →    %y = gossamer::region([%x, %experts, %scores, ...], "4b1c…")
    %y = sum(view(index(%each * %scores, [%inverse])), [1])

Each product of each expert has a region. Experts that get many tokens also have a chain of their products, whose values stay in
caches.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from gossamer.backend.chains.build_chain import build_chain
from gossamer.backend.chains.chain_cost import schedules_of
from gossamer.backend.chains.find_chains import Chain, chain_of
from gossamer.backend.experts.gates import Gate
from gossamer.backend.experts.layers import Layer
from gossamer.backend.experts.replace_experts import put_region
from gossamer.backend.experts.sparse_experts import Judged, expert_at, regions_of
from gossamer.backend.experts.stored_experts import expert_of
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.graph_pass import GraphContext
from gossamer.backend.graph.inputs import Static
from gossamer.backend.regions.build_region import Built, content_hash
from gossamer.backend.report.report import Decision
from gossamer.backend.run import region_op
from gossamer.backend.run.pruned_mixture import MANY, PrunedMixture
from gossamer.runtime.experts.activations import ACTIVATIONS, gated
from gossamer.runtime.torch_internals import make_fx
from gossamer.sparsity.arrays.sorting import sorting_kernel

aten = torch.ops.aten

_Add = Callable[..., fx.Node]


def is_taken(layer: Layer) -> bool:
    """Whether a layer can be such a region: it has no biases, its weights are one value, and the tokens are on a CPU."""
    products = (layer.up, layer.down)
    return all(product.bias is None and not product.pieces for product in products) and layer.x.meta["val"].is_cpu


def put_pruned(
    layer: Layer, up: Judged, down: Judged, statics: Mapping[fx.Node, Static], context: GraphContext
) -> list[Decision]:
    """Replaces a layer whose products are sparse. Returns the decisions about both. Raises CompileError before any change."""
    parts = [each.built(statics, context) for each in (up, down)]
    chains = _chains(layer, up, down, statics, context)
    leaves = [each.experts[0].weight.leaves for each in (up, down)]
    operands = list(dict.fromkeys(leaf for own in leaves for leaf in own))
    through = (*leaves[0] * (1 + (layer.gate.layout != "up")), *leaves[1])
    first, second, chain = (tuple(map(operands.index, own)) for own in (*leaves, through))
    places = first, second, chain
    gate = layer.gate.activation, layer.gate.layout
    key = content_hash("mixture", *(each.key for built in (*parts, chains) for each in built), places, gate)
    region_op.add(
        key, PrunedMixture(regions_of(parts[0]), regions_of(parts[1]), regions_of(chains), places, *gate, sorting_kernel())
    )
    for each in (up, down):
        each.forget()
    put_region(layer, key, operands)
    how = ", and a chain of its products" if chains else ""
    return [each.sparse(built, f"{how}, one operation for the layer") for each, built in zip((up, down), parts, strict=True)]


def _chains(layer: Layer, up: Judged, down: Judged, statics: Mapping[fx.Node, Static], context: GraphContext) -> list[Built]:
    """Returns the chain of each expert; none if experts get few tokens or their products form no chain. Raises CompileError."""
    tokens = up.experts[0].tokens
    if tokens is not None and tokens < MANY:
        return []
    values, built = {node: static.tensor for node, static in statics.items()}, list[Built]()
    for number in range(len(up.experts)):
        made = list[fx.Node]()
        try:
            chain = _chain(layer, number, (up, down), values, made)
            if chain is None or None in schedules_of(chain):
                return []
            names = [f"{statics[each.weight.main].name}[{number}]" for each in chain.contractions]
            given = [[statics[leaf].tensor for leaf in each.weight.leaves] for each in chain.contractions]
            built.append(build_chain(chain, names, given, context.options, context.dump))
        finally:
            for node in reversed(made):
                node.graph.erase_node(node)
    return built


def _chain(
    layer: Layer, number: int, products: tuple[Judged, Judged], values: dict[fx.Node, torch.Tensor], made: list[fx.Node]
) -> Chain | None:
    """Returns the chain of an expert, or None. Adds nodes for it to the graph and to `made`."""
    emit, count = Emitter(layer.node), layer.up.experts

    def add(target: Any, *args: Any, **options: Any) -> fx.Node:
        made.append(emit(target, *args, **options))
        return made[-1]

    first, second = (add(*expert_of(each.weights, number)) for each in products)
    pieces = [add(aten.slice.Tensor, first, 1, *part) for part in _parts(layer.gate.layout, layer.up.outputs)]
    begin = len(made)
    sums = [add(aten.mm.default, products[0].node.args[0], piece) for piece in pieces]
    hidden = _activated(add, sums, layer.gate)
    nodes = [*made[begin:], add(aten.mm.default, hidden, second)]
    return chain_of(nodes, {node: expert_at(node, values, count) for node in nodes if node.target is aten.mm.default})


def _parts(layout: str, rows: int) -> list[tuple[int, int, int]]:
    """Returns (begin, end, step) for the rows of the gate and of up in the first weight."""
    parts = {
        "up": [(0, rows, 1)],
        "halves": [(0, rows // 2, 1), (rows // 2, rows, 1)],
        "interleaved": [(0, rows, 2), (1, rows, 2)],
    }
    return parts[layout]


def _activated(add: _Add, sums: list[fx.Node], gate: Gate) -> fx.Node:
    """Adds the operations of an activation to the graph. Returns its result."""
    function: Any = ACTIVATIONS[gate.activation] if gate.layout == "up" else partial(gated, activation=gate.activation)
    traced = make_fx(function)(*(torch.ones(2, 2, dtype=node.meta["val"].dtype) for node in sums)).graph
    known = dict(zip(traced.find_nodes(op="placeholder"), sums, strict=True))
    for node in [node for node in traced.nodes if node.op == "call_function"]:
        known[node] = add(node.target, *fx.map_arg(node.args, known.__getitem__), **node.kwargs)
    return known[traced.output_node().args[0]]
