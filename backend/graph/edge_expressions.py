"""What a graph computes from its integer inputs alone: edge lists with self loops added, degrees, normalised weights.

Such expressions are cut out as FX graphs of their own. They are evaluated when their leaves (an `edge_index`, weights of
edges that need no gradient) are new, not at every call:

    %row = select(cat([index(%edge_index, [None, ne(…)]), %loops], 1), 0, 0)    →    evaluate(edge_index) = row
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.device import has_kernels
from gossamer.backend.graph.inputs import Inputs
from gossamer.runtime.torch_internals import OpOverload

aten = torch.ops.aten

Place = fx.Node | None

_ON_SIZES = {operator.add, operator.sub, operator.mul, operator.floordiv, torch.sym_sum, torch.sym_max, torch.sym_min}


@dataclass(frozen=True, eq=False)
class Expression:
    """Several values that depend on leaves only.

    leaves    tensors, and `numbers` sizes, in the order in which `evaluate` takes their values
    evaluate  leaf values → the values, None where none was asked for
    key       hash of the expression: equal keys compute the same from equal leaves
    """

    leaves: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]
    evaluate: fx.GraphModule
    key: str


def evaluated(
    evaluate: Callable[..., Any], leaves: Sequence[torch.Tensor], numbers: Sequence[int]
) -> tuple[torch.Tensor | None, ...]:
    """The values that an expression has for real leaves, out of reach of autograd and autocast."""
    with torch.no_grad(), torch.autocast(leaves[0].device.type if leaves else "cpu", enabled=False):
        found: tuple[torch.Tensor | None, ...] = evaluate(*leaves, *numbers)
    return found


@dataclass(frozen=True, eq=False)
class Structure:
    """The leaves of a graph, and all nodes computed from them."""

    leaves: frozenset[fx.Node]
    nodes: frozenset[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Inputs) -> "Structure":
        """Leaves are integer and boolean inputs, sizes, and floating point vectors that need no gradient."""
        leaves = frozenset(n for n in graph.nodes if n.op == "placeholder" and _is_leaf(n, inputs))
        found = set(leaves)
        for node in graph.nodes:
            if _is_pure(node) and all(n in found for n in node.all_input_nodes):
                found.add(node)
        return cls(leaves, frozenset(found))

    def __contains__(self, node: object) -> bool:
        return node in self.nodes

    def cut(self, *places: Place) -> Expression:
        """The expression of some of its nodes."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        order = ancestors([p for p in places if p is not None])
        used = [n for n in order if n in self.leaves]
        tensors = [n for n in used if isinstance(n.meta["val"], torch.Tensor)]
        numbers = [n for n in used if n not in tensors]
        for position, leaf in enumerate((*tensors, *numbers)):
            copies[leaf] = graph.placeholder(f"leaf{position}")
        for node in order:
            if node not in copies:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
                copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        graph.output(tuple(copies[p] if p is not None else None for p in places))
        evaluate = fx.GraphModule({}, graph)
        key = hashlib.sha256(evaluate.code.encode()).hexdigest()[:16]
        return Expression(tuple(tensors), tuple(numbers), evaluate, key)


_CONSTANTS = {
    aten.new_ones.default: 1, aten.ones_like.default: 1, aten.new_zeros.default: 0, aten.zeros_like.default: 0,
    aten.new_full.default: None, aten.full_like.default: None,
}  # fmt: skip


def part_sizes_from_values(graph: fx.Graph, inputs: Inputs) -> None:
    """Frees from a tensor's values what needs its size or type only, so that it may belong to the structure.

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
    """The sizes of the tensor that a node is like."""
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
    if not isinstance(value, torch.Tensor) or not has_kernels(value.device) or value.layout is not torch.strided:
        return False
    if value.is_floating_point() or value.is_complex():
        given = inputs.value(node)
        return value.dim() == 1 and given is not None and not given.requires_grad
    return True


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in _ON_SIZES:
        return True
    return (
        isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt)
    )


def ancestors(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes and all they are computed from, producers first."""
    seen: dict[fx.Node, None] = {}
    stack: list[tuple[fx.Node, Any]] = [(node, False) for node in reversed(nodes)]
    while stack:
        node, done = stack.pop()
        if done:
            seen[node] = None
        elif node not in seen:
            stack.append((node, True))
            stack += [(n, False) for n in reversed(node.all_input_nodes)]
    return list(seen)
