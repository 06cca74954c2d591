"""Products of low rank beside a sparse one, as LoRA has them: two dense factors with few features between.

    %y = addmm(%bias, %x, permute(%w))        sparse
    %h = mm(%x, permute(%a))                  narrows:  [T, K] -> [T, R]
    %z = mm(%h, permute(%b))                  widens:   [T, R] -> [T, M]
    %o = add(%y, mul(%z, 2))

In a chain, the tile that the sparse product reads is multiplied with `a`, too, and the sums of the sparse product get theirs of
`b` before they leave their registers: nothing of [T, M] goes through memory. The factors are ordinary operands, so that other
adapters need no other kernel.
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
"""The highest rank: beyond it, a product of its own runs at a better rate than inside of a chain."""


@dataclass(frozen=True)
class Inner:
    """A product x @ w of a matrix of tokens and a dense matrix, to which an `addend` may be added.

    stored      the matrix as it lies in memory; `transposed` says that w is its transpose
    """

    node: fx.Node
    x: fx.Node
    stored: fx.Node
    transposed: bool
    addend: fx.Node | None

    @property
    def features(self) -> tuple[int, int]:
        """Those summed over, and those of the result."""
        return self.x.meta["val"].shape[-1], self.node.meta["val"].shape[-1]

    @property
    def rank(self) -> int:
        """The smaller number of features."""
        return min(self.features)


Product = Contraction | Inner
"""What a chain multiplies by: a sparse weight, or a dense factor beside one."""


def inner_at(node: fx.Node) -> Inner | None:
    """The product of low rank that a node is, if it is one."""
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
    """The products of low rank whose result is combined with that of a sparse product, element by element, and those that
    such a product multiplies."""
    found = {node: inner for node in graph.nodes if (inner := inner_at(node)) is not None and node not in sparse}
    summed = _made_by_elements(graph, sparse)
    beside = {node for node in found if found[node].features[0] == found[node].rank and _meets(node, summed)}
    return {node: inner for node, inner in found.items() if node in beside or _leads_to(node, beside)}


def _made_by_elements(graph: fx.Graph, sparse: Container[fx.Node]) -> set[fx.Node]:
    """The results of sparse products, and what is made of them by elements."""
    found = set[fx.Node]()
    for node in graph.nodes:
        if node in sparse or ((is_identity(node) or is_elementwise(node)) and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _meets(node: fx.Node, summed: Container[fx.Node]) -> bool:
    """Whether what is made of a product alone, by elements, meets such a result."""
    while (user := only_user(node)) is not None and (is_elementwise(user) or is_identity(user)):
        if any(other in summed for other in user.all_input_nodes if other is not node):
            return True
        node = user
    return False


def _leads_to(node: fx.Node, products: Container[fx.Node]) -> bool:
    """Whether one of these products multiplies what is made of a node by elements."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user in products:
                return True
            if user not in seen and (is_identity(user) or is_elementwise(user)):
                seen.add(user)
                pending.append(user)
    return False
