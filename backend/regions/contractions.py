"""Finds contractions with a static matrix, in all forms that ATen has.

    addmm(bias, view(x), permute(w))              linear
    mm(x, permute(w)), mm(x, w)                   x @ w.T, x @ w, and grad_y @ w in a backward graph
    mm(w, x), bmm(expand(w), x)                   w @ x: the weight is on the left
    bmm(x, expand(permute(w))), baddbmm(...)      a batch that could not be flattened
    _int_mm(x, permute(w))                        factors of int8, sums of int32
    int8_product(x, permute(w))                   the same, for any sizes
    out_dtype(mm, int32, x, permute(w))           the same, as torchao writes it on GPUs

All mean y[t, m] = sum_k x[t, k] w[m, k], up to views and, for a weight on the left, two transposes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import SymInt, fx

from gossamer.backend.devices.measured_times import Times
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.fusable import kind_of
from gossamer.backend.graph.nodes import SPREADS, ancestors, arguments, equal_sizes, hints, is_backward
from gossamer.backend.graph.weight_expressions import Weight, weight_behind
from gossamer.runtime.int8_product import int8_product

aten, out_dtype = torch.ops.aten, torch.ops.higher_order.out_dtype

Side = Literal["left", "right"]

Order = torch.Tensor
"""The indices of a matrix's rows or columns in a new order, int64."""

# op → indices of (addend, left factor, right factor) among its arguments
_PRODUCTS: dict[Any, tuple[int | None, int, int]] = {
    aten.mm.default: (None, 0, 1),
    aten.bmm.default: (None, 0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten._int_mm.default: (None, 0, 1),
    int8_product: (None, 0, 1),
    out_dtype: (None, 2, 3),
}
_INTEGER = (aten._int_mm.default, int8_product, out_dtype)


@dataclass(frozen=True)
class Contraction:
    """A product in a graph. One of its factors is a weight.

    node    the product; its value is [..., m] for a weight on the right, [..., m, n] for one on the left
    x       the other factor: [..., k] or [..., k, n]
    weight  the matrix
    side    the side of the weight
    m, k    sizes of the weight: results, and elements that are summed
    addend  the addend in y = alpha * product + beta * addend, or None
    times   measured times of the product, by `tokens_class`; may be empty
    orders  orders of m and of k in which the weight is stored, if not in those of the graph (reorder_into_blocks.py)
    """

    node: fx.Node
    x: fx.Node
    weight: Weight
    side: Side
    m: int
    k: int
    addend: fx.Node | None
    alpha: float
    beta: float
    times: Mapping[int, Times] = field(default_factory=dict, compare=False)
    orders: tuple[Order, Order] | None = field(default=None, compare=False)

    @property
    def tokens(self) -> int | None:
        """The rows of x as a matrix. For a dynamic size its hint, or None if it has none."""
        sizes = list(self.x.meta["val"].shape)
        del sizes[-1 if self.side == "right" else -2]
        known = hints(sizes)
        return None if known is None else prod(known)

    @property
    def given(self) -> torch.dtype:
        """The type of x. The weight has the same type, unless it is rounded to bf16."""
        dtype: torch.dtype = self.x.meta["val"].dtype
        return dtype

    @property
    def quantized(self) -> bool:
        """Whether this is a product of int8 with exact sums."""
        return self.node.target in _INTEGER

    @property
    def dynamic(self) -> bool:
        """Whether only the call knows the number of tokens."""
        return any(isinstance(size, SymInt) for size in self.x.meta["val"].shape)

    @property
    def axis(self) -> int:
        """The dimension of the product that has the m results, from the end."""
        return -1 if self.side == "right" else -2

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward part of a joint graph."""
        return is_backward(self.node)

    @property
    def op(self) -> str:
        """The name of the use, for users."""
        name = "linear" if self.side == "right" else "weight @ x"
        return f"{name} backward" if self.backward else name


def find(graph: fx.Graph, leaf_values: dict[fx.Node, torch.Tensor]) -> list[Contraction]:
    """Returns all contractions of a graph with a weight that is computed from the given leaves, in order.

    If both factors are static, the one with more zeros is the weight. Leaves out products from which static filters of
    convolutions are computed, as with a spectral norm. They become part of the filters' expression, which cannot own a region.
    """
    static = computed_from(graph, leaf_values)
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    inside = set(ancestors([node.args[1] for node in convolutions if node.args[1] in static]))
    nodes = [node for node in graph.nodes if node not in inside]
    return [c for n in nodes if (c := _contraction_at(n, static, leaf_values)) is not None]


def contraction_at(node: fx.Node, leaf_values: dict[fx.Node, torch.Tensor]) -> Contraction | None:
    """Returns the contraction that a node computes, or None."""
    return _contraction_at(node, computed_from(node.graph, leaf_values), leaf_values)


def split_addends(graph: fx.Graph, leaf_values: dict[fx.Node, torch.Tensor]) -> None:
    """Separates addends from their products if a region cannot read them there.

    addmm(%c, %w, %x)   →   add(mm(%w, %x), %c)          with a weight on the left, or a %c of another shape
    """
    static = computed_from(graph, leaf_values)
    for node in list(graph.nodes):
        plain = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}.get(node.target)
        if plain is None:
            continue
        addend, left, right = node.args
        if _unbatched(left) not in static and kind_of(addend, node.meta["val"].shape) is not None:
            continue
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        emit = Emitter(node)
        result = emit(plain, left, right)
        if alpha != 1:
            result = emit(aten.mul.Tensor, result, alpha)
        if beta != 0:
            result = emit(aten.add.Tensor, result, addend, **({} if beta == 1 else {"alpha": beta}))
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _contraction_at(node: fx.Node, static: set[fx.Node], leaf_values: dict[fx.Node, torch.Tensor]) -> Contraction | None:
    if node.op != "call_function" or node.target not in _PRODUCTS:
        return None
    given = arguments(node)
    if node.target is out_dtype and given[:2] != (aten.mm.default, torch.int32):
        return None
    addend, left, right = _PRODUCTS[node.target]
    found: list[Contraction] = []
    sides: tuple[tuple[Side, int, int], ...] = (("right", right, left), ("left", left, right))
    for side, at, other in sides:
        operand = _unbatched(given[at])
        weight = weight_behind(operand, leaf_values) if operand in static else None
        if weight is not None:
            found.append(_contraction(node, given[other], weight, side, addend))
    return min(found, key=lambda c: c.weight.density) if found else None


def _contraction(node: fx.Node, x: fx.Node, weight: Weight, side: Side, addend: int | None) -> Contraction:
    rows, columns = weight.shape
    if weight.transposed:
        rows, columns = columns, rows
    m, k = (columns, rows) if side == "right" else (rows, columns)
    scales: Any = node.kwargs
    alpha, beta = scales.get("alpha", 1), scales.get("beta", 1)
    added = None if addend is None or beta == 0 else arguments(node)[addend]
    return Contraction(node, x, weight, side, m, k, added, alpha, beta)


def _unbatched(operand: fx.Node) -> fx.Node:
    """Returns the matrix that an operand of bmm repeats, or the operand itself.

    Views and expansions that keep the last two sizes only regroup batches. So if they begin with a matrix, each batch is
    that matrix.
    """
    node = operand
    while node.op == "call_function" and node.target in SPREADS and node.meta["val"].dim() > 2:
        source = node.all_input_nodes[0]
        if source.meta["val"].dim() < 2 or not equal_sizes(source.meta["val"].shape[-2:], node.meta["val"].shape[-2:]):
            break
        node = source
    return node if node.meta["val"].dim() == 2 else operand
