"""Finds the order of the tokens in each value of a chain: sequence by sequence, [B, S], or position by position, [S, B].

A chain works on tiles of one sequence, so that it has to know the order of its inputs and outputs in memory. Attention tells
the order of its own operands. From there the order follows through the graph, which may swap it and swap it back
(`nn.MultiheadAttention` does).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from gossamer.backend.chains.attention import Attention
from gossamer.backend.graph.fusable import constant_of, is_elementwise, kind_of
from gossamer.backend.graph.nodes import arguments, equal, equal_sizes
from gossamer.backend.regions.low_rank import Product

aten = torch.ops.aten


def swaps_tokens(node: fx.Node) -> bool:
    """Whether a node turns [S, B, N] into [B, S, N] or back."""
    if node.op != "call_function":
        return False
    if node.target is aten.permute.default:
        return list(arguments(node)[1]) == [1, 0, 2]
    return node.target is aten.transpose.int and set(node.args[1:]) == {0, 1} and node.meta["val"].dim() == 3


def token_orders(
    nodes: Sequence[fx.Node], products: Mapping[fx.Node, Product], attention: Sequence[Attention]
) -> dict[fx.Node, bool] | None:
    """Returns for each value that the nodes compute or read whether its rows come position by position.

    Returns None in three cases: orders contradict each other, tokens change their order but no attention tells it, or the
    dimensions that change places are not batch and length.
    """
    if not attention:
        return None if any(swaps_tokens(node) for node in nodes) else {}
    members = {node for a in attention for node in a.members}
    moving = [node for node in nodes if node not in members and _moves_tokens(node)]
    batch, _, length, _ = attention[0].call.values[0].shape
    if equal(batch, 1) or equal(length, 1):
        return None if moving else {}
    links = [(a, b, swaps) for a in nodes if a not in members for b, swaps in _read(a, products)]
    orders = _spread(_told_by(attention), links)
    if orders is None:
        return None
    sizes = {False: (batch, length), True: (length, batch)}
    for node in moving:
        source = node.all_input_nodes[0]
        if source not in orders or not equal_sizes(source.meta["val"].shape[:2], sizes[orders[source]]):
            return None
    return orders


def _told_by(attention: Sequence[Attention]) -> Iterator[tuple[fx.Node, bool]]:
    """Yields the values that attention reads and computes, each with its order."""
    for found in attention:
        for heads in (*found.operands, *(step.heads for step in found.per_head)):
            yield heads.matrix, heads.by_position
        yield found.output, found.by_position


def _spread(told: Iterable[tuple[fx.Node, bool]], links: Sequence[tuple[fx.Node, fx.Node, bool]]) -> dict[fx.Node, bool] | None:
    """Returns the orders that are told and those of all linked values; None if they contradict each other.

    A link is two values, and whether one has the order of the other swapped.
    """
    neighbours = defaultdict[fx.Node, list[tuple[fx.Node, bool]]](list)
    for a, b, swaps in links:
        neighbours[a].append((b, swaps))
        neighbours[b].append((a, swaps))
    orders, pending = dict[fx.Node, bool](), list(told)
    while pending:
        node, order = pending.pop()
        if node not in orders:
            orders[node] = order
            pending += [(other, order != swaps) for other, swaps in neighbours[node]]
        elif orders[node] != order:
            return None
    return orders


def _moves_tokens(node: fx.Node) -> bool:
    """Whether a node changes the order of rows in memory. It does not if a dimension that changes places has size 1."""
    return swaps_tokens(node) and not any(equal(size, 1) for size in node.meta["val"].shape[:2])


def _read(node: fx.Node, products: Mapping[fx.Node, Product]) -> list[tuple[fx.Node, bool]]:
    """Returns the values with one row for each token that a node reads, each with whether the node swaps its order."""
    if node in products:
        product = products[node]
        addend, shape = product.addend, node.meta["val"].shape
        added = [addend] if addend is not None and kind_of(addend, shape) in ("matrix", "column") else []
        return [(each, False) for each in (product.x, *added)]
    if is_elementwise(node):
        shape = node.meta["val"].shape
        return [
            (n, False) for n in node.all_input_nodes if constant_of(n) is None and kind_of(n, shape) in ("matrix", "column")
        ]
    return [(node.all_input_nodes[0], _moves_tokens(node))]
