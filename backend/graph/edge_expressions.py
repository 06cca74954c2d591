"""Finds values that a graph computes only from its integer inputs: edge lists with self loops, degrees, normalised weights.

Their expressions are copied into FX graphs of their own. They are evaluated when their leaves change (an `edge_index`, weights
of edges without gradients), not at every call:

    %row = select(cat([index(%edge_index, [None, ne(…)]), %loops], 1), 0, 0)    →    evaluate(edge_index) = row
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.device import has_kernels
from gossamer.backend.graph.expressions import Expression, Place, computed_from, cut
from gossamer.backend.graph.inputs import Inputs, overwritten
from gossamer.backend.graph.nodes import is_tangent

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Structure:
    """The structure of a graph: its leaves, and all nodes computed only from them."""

    leaves: frozenset[fx.Node]
    nodes: frozenset[fx.Node]
    _cuts: dict[tuple[Place, ...], Expression] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Inputs) -> "Structure":
        """Returns the structure of a graph. Leaves are integer and boolean inputs, sizes, and vectors of floats without
        gradients. The graph must not write to a leaf."""
        leaves = frozenset(n for n in graph.nodes if n.op == "placeholder" and _is_leaf(n, inputs)) - overwritten(graph)
        return cls(leaves, frozenset(computed_from(graph, leaves)))

    def __contains__(self, node: object) -> bool:
        return node in self.nodes

    def cut(self, *places: Place) -> Expression:
        """Returns the expression of some of its nodes."""
        if places not in self._cuts:
            self._cuts[places] = cut(places, self.leaves)
        return self._cuts[places]


_CONSTANTS = {
    aten.new_ones.default: 1, aten.ones_like.default: 1, aten.new_zeros.default: 0, aten.zeros_like.default: 0,
    aten.new_full.default: None, aten.full_like.default: None,
}  # fmt: skip
"""Operations that fill a tensor like another one, and their number; None if it is an argument."""


def part_sizes_from_values(graph: fx.Graph, inputs: Inputs) -> None:
    """Rewrites nodes that need only the size or type of a tensor, so that they no longer depend on its values.

    Then they may belong to the structure.

    new_ones(%message, [%n])     →   full([%n], 1)
    sym_size(%message, 0)        →   sym_size(%source, 0)
    """
    for node in [n for n in graph.nodes if n.target in _CONSTANTS]:
        value = node.meta["val"]
        if value.layout is torch.strided:
            fill = _CONSTANTS[node.target]
            with graph.inserting_before(node):
                size = _sizes(node) if "_like" in str(node.target) else node.args[1]
                options = {"dtype": value.dtype, "layout": value.layout, "device": value.device, "pin_memory": False}
                constant = graph.call_function(aten.full.default, (size, node.args[-1] if fill is None else fill), options)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
    structure = Structure.of(graph, inputs)
    known: dict[Any, tuple[fx.Node, int | None]] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node in structure:
            for size, dim in [(value, None)] if isinstance(value, torch.SymInt) else _open_sizes(value):
                known.setdefault(size.node.expr, (node, dim))
        elif isinstance(value, torch.SymInt) and value.node.expr in known:
            source, dim = known[value.node.expr]
            with graph.inserting_before(node):
                same = source if dim is None else graph.call_function(aten.sym_size.int, (source, dim))
            if dim is not None:
                same.meta = {**node.meta, "val": value}
            node.replace_all_uses_with(same)


def _open_sizes(value: Any) -> list[tuple[torch.SymInt, int]]:
    sizes: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
    return [(size, dim) for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)]


def _sizes(like: fx.Node) -> list[Any]:
    """Returns the sizes of the tensor that a node is like."""
    source: Any = like.args[0]
    sizes: list[Any] = []
    for dim, size in enumerate(like.meta["val"].shape):
        node = size
        if isinstance(size, torch.SymInt):
            node = like.graph.call_function(aten.sym_size.int, (source, dim))
            node.meta["val"] = size
        sizes.append(node)
    return sizes


def _is_leaf(node: fx.Node, inputs: Inputs) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return True
    if is_tangent(node):  # integer results have tangents, too
        return False
    if not isinstance(value, torch.Tensor) or not has_kernels(value.device) or value.layout is not torch.strided:
        return False
    if value.is_floating_point() or value.is_complex():
        given = inputs.value(node)
        return value.dim() == 1 and given is not None and not given.requires_grad
    return True
