"""Finds products of low rank beside a sparse one, as in LoRA: two dense factors with few features between them.

    %y = addmm(%bias, %x, permute(%w))        sparse
    %h = mm(%x, permute(%a))                  narrows:  [T, K] -> [T, R]
    %z = mm(%h, permute(%b))                  widens:   [T, R] -> [T, M]
    %o = add(%y, mul(%z, 2))

In a chain, the tile that the sparse product reads is also multiplied by `a`. The sums with `b` are added to those of the sparse
product in registers. So no [T, M] tensor is written in between. The factors are ordinary operands, so other adapters need no
other kernel.
"""

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import fx

from gossamer.backend.devices.device_kernel import DTYPES
from gossamer.backend.graph.fusable import is_elementwise, is_identity, kind_of
from gossamer.backend.graph.nodes import arguments, only_user
from gossamer.backend.regions.contractions import Contraction

aten = torch.ops.aten

WIDEST = 128
"""The highest rank. Products of higher ranks are faster outside of a chain."""


@dataclass(frozen=True)
class Inner:
    """A product x @ w of a matrix of tokens and a dense matrix, plus an `addend` if there is one.

    stored      the dense matrix in memory
    transposed  whether w is the transpose of `stored`
    """

    node: fx.Node
    x: fx.Node
    stored: fx.Node
    transposed: bool
    addend: fx.Node | None

    @property
    def features(self) -> tuple[int, int]:
        """The number of features that are summed over, and that of the result."""
        return self.x.meta["val"].shape[-1], self.node.meta["val"].shape[-1]

    @property
    def rank(self) -> int:
        """The smaller number of features."""
        return min(self.features)


Product = Contraction | Inner
"""A product in a chain: with a sparse weight, or with a dense factor beside one."""


def inner_at(node: fx.Node) -> Inner | None:
    """Returns the product of low rank that a node computes, or None."""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    *addend, x, w = arguments(node)
    stored, transposed = w, False
    while stored.target is aten.permute.default or stored.target is aten.t.default:
        stored, transposed = stored.all_input_nodes[0], not transposed
    sizes = *w.meta["val"].shape, x.meta["val"].shape[-1]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or min(sizes) > WIDEST:
        return None
    if any(each.meta["val"].dtype != node.meta["val"].dtype for each in (x, w)) or node.meta["val"].dtype not in DTYPES:
        return None
    if addend and kind_of(addend[0], node.meta["val"].shape) != "vector":
        return None
    return Inner(node, x, stored, transposed, addend[0] if addend else None)


def find_low_rank(graph: fx.Graph, sparse: Container[fx.Node]) -> dict[fx.Node, Inner]:
    """Returns products of low rank, by their nodes: those that elementwise operations combine with a sparse product, and those
    whose result such a product multiplies."""
    found = {node: inner for node in graph.nodes if (inner := inner_at(node)) is not None and node not in sparse}
    summed = _made_by_elements(graph, sparse)
    beside = {node for node in found if found[node].features[0] == found[node].rank and _meets(node, summed)}
    return {node: inner for node, inner in found.items() if node in beside or _leads_to(node, beside)}


def _made_by_elements(graph: fx.Graph, sparse: Container[fx.Node]) -> set[fx.Node]:
    """Returns the results of sparse products, and values computed from them by elementwise operations."""
    found = set[fx.Node]()
    for node in graph.nodes:
        if node in sparse or ((is_identity(node) or is_elementwise(node)) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _meets(node: fx.Node, summed: Container[fx.Node]) -> bool:
    """Whether elementwise operations combine the result of a product with one of the nodes in `summed`."""
    while (user := only_user(node)) is not None and (is_elementwise(user) or is_identity(user)):
        if any(other in summed for other in user.all_input_nodes if other is not node):
            return True
        node = user
    return False


def _leads_to(node: fx.Node, products: Container[fx.Node]) -> bool:
    """Whether one of these products multiplies a node, also after elementwise operations."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user in products:
                return True
            if user not in seen and (is_identity(user) or is_elementwise(user)):
                seen.add(user)
                pending.append(user)
    return False
