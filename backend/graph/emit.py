"""Adding nodes to a graph, with the values that later rewritings ask about."""

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import COPIES, equal, fixed_value, function_of
from gossamer.dialects.errors import GossamerError
from gossamer.runtime.torch_internals import detect_fake_mode, tree_map_only

aten = torch.ops.aten

_OWN = ("val", "tensor_meta", "original_aten", "eager_input_vals")  # metadata that belongs to one call


class Emitter:
    """Adds nodes right before one node, or another one, with its provenance and their own fake values."""

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
        """What a node computes from the fake values of its operands."""
        with self._mode:
            return function_of(node)(*fx.map_arg(node.args, _value), **fx.map_arg(node.kwargs, _value))

    def fake(self, value: torch.Tensor) -> torch.Tensor:
        """What a graph knows of a tensor that never changes."""
        found: torch.Tensor = self._mode.from_tensor(value, static_shapes=True)
        return found

    def now(self, node: Any) -> Any:
        """The node that computes this value now; a number stays what it is."""
        return self._replaced.get(node, node)

    def sizes(self, node: fx.Node, axes: tuple[int, ...]) -> list[int | fx.Node]:
        """Some sizes of a value: numbers where they are static."""
        node = self.now(node)
        shape = node.meta["val"].shape
        numbers = [_number(shape[a]) for a in axes]
        return [s if isinstance(s, int) else self(aten.sym_size.int, node, a) for a, s in zip(axes, numbers, strict=True)]

    def zeros(self, like: fx.Node) -> fx.Node:
        """Zeros of the sizes and the type of a value, in an operation that Inductor lowers."""
        value = like.meta["val"]
        sizes = self.sizes(like, tuple(range(value.dim())))
        return self(aten.full.default, sizes, 0, dtype=value.dtype, device=value.device)

    def _size(self, size: torch.SymInt) -> int | fx.Node:
        """A size as an argument, since a graph holds no symbols: the number that guards have fixed, or a node that has it."""
        number = _number(size)
        if isinstance(number, int):
            return number
        for node in self._before.graph.nodes:
            if node is self._before:
                break
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and equal(value, size):
                return node
            if isinstance(value, torch.Tensor):
                axis = next((a for a, extent in enumerate(value.shape) if equal(extent, size)), None)
                if axis is not None:
                    return self(aten.sym_size.int, node, axis)
        raise GossamerError(f"no value before {self._before} has the size {size}")


def take_place(node: fx.Node, by: fx.Node) -> None:
    """Has all that uses the results of a node use those of another, which may lie otherwise in memory.

    What a backward graph is given is described by these values: by those of before, its strides would be fixed to the numbers
    that they had when it was traced. Results that the graph returns are brought to the old strides, so they keep the values.
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
    """A size; a number where guards have fixed it."""
    fixed = fixed_value(size)
    return size if fixed is None else fixed


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def provenance(node: fx.Node) -> dict[str, Any]:
    """What nodes made for a node have of its metadata."""
    return {k: v for k, v in node.meta.items() if k not in _OWN}


def constant(before: fx.Node, value: torch.Tensor) -> fx.Node:
    """A node before another one for a tensor that the graph holds from now on."""
    module = before.graph.owning_module
    assert module is not None
    number = 0
    while hasattr(module, name := f"_held_{number}"):
        number += 1
    module.register_buffer(name, value)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(aten.lift_fresh_copy.default, (before.graph.get_attr(name),))  # as tracing has them
    mode = detect_fake_mode([before.meta["val"]])
    node.meta["val"] = mode.from_tensor(value)
    return node
