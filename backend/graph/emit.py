"""Adds nodes to a graph, with the fake values in `meta["val"]` that later passes read."""

import operator
from collections.abc import Iterator, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.inputs import constants
from gossamer.backend.graph.nodes import COPIES, equal, fixed_value, function_of, is_tangent
from gossamer.dialects.errors import GossamerError
from gossamer.runtime.torch_internals import detect_fake_mode, tree_map_only

aten = torch.ops.aten

_OWN = ("val", "tensor_meta", "original_aten", "eager_input_vals")  # metadata that belongs to one call


class Emitter:
    """Adds nodes for a node, directly before it, or before the node `before`.

    New nodes have the provenance metadata of that node and their own fake values.

    replaced  maps old nodes to the nodes that compute their values now (see `now`)
    """

    def __init__(
        self,
        node: fx.Node,
        replaced: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
        before: fx.Node | None = None,
    ) -> None:
        self._node, self._before, self._replaced = node, before or node, replaced
        self._mode = detect_fake_mode([node.meta["val"]])

    def __call__(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        args = tree_map_only(torch.SymInt, self._size, args)
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(target, args, options)
        node.meta = provenance(self._node)
        node.meta["val"] = self.evaluated(node)
        return node

    def evaluated(self, node: fx.Node) -> Any:
        """Returns the fake value that a node computes from the fake values of its operands."""
        with self._mode:
            return function_of(node)(*fx.map_arg(node.args, _value), **fx.map_arg(node.kwargs, _value))

    def fake(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a fake value for a tensor that never changes."""
        found: torch.Tensor = self._mode.from_tensor(value, static_shapes=True)
        return found

    def now(self, node: Any) -> Any:
        """Returns the node that computes a node's value now. Returns numbers unchanged."""
        return self._replaced.get(node, node)

    def sizes(self, node: fx.Node, axes: tuple[int, ...]) -> list[int | fx.Node]:
        """Returns some sizes of a value: numbers for static sizes, nodes for symbolic ones."""
        node = self.now(node)
        shape = node.meta["val"].shape
        numbers = [_number(shape[a]) for a in axes]
        return [s if isinstance(s, int) else self(aten.sym_size.int, node, a) for a, s in zip(axes, numbers, strict=True)]

    def zeros(self, like: fx.Node) -> fx.Node:
        """Adds zeros with the sizes and the type of a value. Uses an operation that Inductor can lower."""
        value = like.meta["val"]
        sizes = self.sizes(like, tuple(range(value.dim())))
        return self(aten.full.default, sizes, 0, dtype=value.dtype, device=value.device)

    def _size(self, size: torch.SymInt) -> int | fx.Node:
        """Returns a size as an argument: the number that guards have fixed, or a node. Arguments cannot be symbols."""
        number = _number(size)
        if isinstance(number, int):
            return number
        for node in self._ahead():
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and equal(value, size):
                return node
            if isinstance(value, torch.Tensor):
                axis = next((a for a, extent in enumerate(value.shape) if equal(extent, size)), None)
                if axis is not None:
                    return self(aten.sym_size.int, node, axis)
        raise GossamerError(f"no value before {self._before} has the size {size}")

    def _ahead(self) -> Iterator[fx.Node]:
        """Yields the nodes before new nodes. Tangents come last, because no node of the forward pass may read them."""
        for tangents in (False, True):
            nodes = takewhile(lambda node: node is not self._before, self._before.graph.nodes)
            yield from (node for node in nodes if is_tangent(node) is tangents)


def take_place(node: fx.Node, by: fx.Node) -> None:
    """Replaces a node by another one, whose results may have other strides, and updates the fake values of the results.

    Fake values describe the inputs of a backward graph. With the old values, strides would be fixed to the traced numbers.
    Results that the graph returns keep their old fake values, because `strides.py` restores their strides.
    """
    node.replace_all_uses_with(by)
    results: list[tuple[fx.Node, Any]] = [
        (user, by.meta["val"][user.args[1]])
        for user in by.users
        if user.target is operator.getitem and not any(each.op == "output" for each in user.users)
    ]
    emit = Emitter(by)
    while results:
        result, value = results.pop()
        result.meta["val"] = value
        results += [(user, emit.evaluated(user)) for user in result.users if user.target in COPIES]


def _number(size: Any) -> Any:
    """Returns a size, or its number if guards have fixed it."""
    fixed = fixed_value(size)
    return size if fixed is None else fixed


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def provenance(node: fx.Node) -> dict[str, Any]:
    """Returns the metadata that new nodes take over from the node that they are made for."""
    return {k: v for k, v in node.meta.items() if k not in _OWN}


def constant(before: fx.Node, value: torch.Tensor) -> fx.Node:
    """Adds a constant tensor to a graph. Returns its node, which is before another one."""
    module = before.graph.owning_module
    assert module is not None
    number = 0
    while hasattr(module, name := f"_held_{number}"):
        number += 1
    module.register_buffer(name, value)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(aten.lift_fresh_copy.default, (before.graph.get_attr(name),))  # as in traced graphs
    mode = detect_fake_mode([before.meta["val"]])
    node.meta["val"] = mode.from_tensor(value)
    return node


def spell_out_numbers(graph: fx.Graph) -> None:
    """Replaces constants without dimensions, such as torch.tensor(2.0) in a model's code, by operations that make them.

    lift_fresh_copy(%_tensor_constant0)    →    full([], 2.0)

    So they are no leaves of weights. Inductor cannot pass constants of a graph to regions (torch 2.13).
    """
    for node, value in constants(graph).items():
        for user in [user for user in node.users if user.target is aten.lift_fresh_copy.default and value.dim() == 0]:
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            user.replace_all_uses_with(Emitter(user)(aten.full.default, [], value.item(), **options))
            graph.erase_node(user)
