"""Finds the values that nodes of Dynamo's graph write to, as in `relu(x, inplace=True)`, `x += y` and `x[:, 0].mul_(2)`."""

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.nodes import argument
from gossamer.runtime.torch_internals import OpOverload, is_traceable_wrapper_subclass

_INTO = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.setitem,
}  # fmt: skip
_METHODS = {f"__{function.__name__}__" for function in _INTO}

_NORM = ("running_mean", "running_var")
_IF: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.batch_norm: ("training", _NORM),
    F.instance_norm: ("use_input_stats", _NORM),
    F.embedding: ("max_norm", ("weight",)),
    F.embedding_bag: ("max_norm", ("weight",)),
    torch.batch_norm: ("training", _NORM),
    torch.native_batch_norm: ("training", _NORM),
    torch.instance_norm: ("use_input_stats", _NORM),
}
"""Functions that write to parameters if another parameter is set: that one, and those."""

_BUILTIN = ("input", "weight", "bias", *_NORM)
_PLACES = {
    torch.batch_norm: (*_BUILTIN, "training"),
    torch.native_batch_norm: (*_BUILTIN, "training"),
    torch.instance_norm: (*_BUILTIN, "use_input_stats"),
}
"""Parameters of functions in C++, for which Python knows none."""


@lru_cache
def places(function: Any) -> Mapping[str, int]:
    """Returns the position of each parameter of a function; none if Python does not know them."""
    if function in _PLACES:
        return {name: n for n, name in enumerate(_PLACES[function])}
    try:
        return {name: n for n, name in enumerate(inspect.signature(function).parameters)}
    except (TypeError, ValueError):
        return {}


def writes(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose values a node changes. Other nodes may share the memory of these values; see `written`."""
    if node.op not in ("call_function", "call_method"):
        return []
    changed, found = [node.kwargs.get("out"), *_changed(node)], list[fx.Node]()
    fx.map_arg(changed, found.append)
    return found


def _changed(node: fx.Node) -> Iterator[Any]:
    target: Any = node.target
    name = target if node.op == "call_method" else getattr(target, "__name__", "")
    underscored = name.endswith("_") and not name.endswith("__")
    if underscored or target in _INTO or target in _METHODS or _given(node, "inplace"):
        yield argument(node, 0, "input")
    if target in _IF and _given(node, _IF[target][0]):
        yield [_given(node, each) for each in _IF[target][1]]
    for schema in _schemas(target):
        for place, each in enumerate(schema.arguments):
            if each.alias_info is not None and each.alias_info.is_write:
                yield node.kwargs.get(each.name) if each.kwarg_only else argument(node, place, each.name)
    if any(map(_writes_to_inputs, _bodies(node))):
        yield node.args


def _given(node: fx.Node, name: str) -> Any:
    """Returns the argument for a parameter; None if the node passes none."""
    place = places(node.target).get(name) if node.op == "call_function" else None
    return node.kwargs.get(name) if place is None else argument(node, place, name)


def _schemas(target: Any) -> list[Any]:
    overloads = getattr(target, "overloads", None)  # without one, as in torch.ops.aten.add_
    if callable(overloads):
        return [getattr(target, name)._schema for name in overloads()]
    return [target._schema] if isinstance(target, OpOverload) else []


def _bodies(node: fx.Node) -> list[fx.Graph]:
    """Returns the graphs that a node calls, such as the layers under a checkpoint."""
    owner = node.graph.owning_module
    names = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    found = [getattr(owner, name, None) for name in names]
    return [each.graph for each in found if isinstance(each, fx.GraphModule)]


def _writes_to_inputs(graph: fx.Graph) -> bool:
    return not written(graph).isdisjoint(graph.find_nodes(op="placeholder"))


def written(graph: fx.Graph, memory: Mapping[fx.Node, Sequence[fx.Node]] | None = None) -> set[fx.Node]:
    """Returns all nodes whose memory is written to, maybe by a write to another node.

    memory  the result of `sharing`, if it is known
    """
    targets = [each for node in graph.nodes for each in writes(node)]
    memory = sharing(graph) if memory is None and targets else memory
    return {other for each in targets for other in memory[each]} if memory else set()


def seen_later(graph: fx.Graph, memory: Mapping[fx.Node, Sequence[fx.Node]]) -> set[fx.Node]:
    """Returns all nodes that may share memory with a value that a node changes and others read afterwards, as y in

        y[:, :8].mul_(2)
        linear(y)

    In `linear(relu(y, inplace=True))`, only the result of the write is read. `memory` is the result of `sharing`.
    """
    order, found = {node: n for n, node in enumerate(graph.nodes)}, set[fx.Node]()
    for node in graph.nodes:
        for each in writes(node):
            names, results = memory[each], {node}
            for name in names:
                if not results.isdisjoint(name.all_input_nodes):
                    results.add(name)
            others = [name for name in names if name not in results]
            if any(name.op in ("placeholder", "get_attr") for name in others) or any(
                order[user] > order[node] for name in others for user in name.users
            ):
                found.update(names)
    return found


def sharing(graph: fx.Graph) -> dict[fx.Node, Sequence[fx.Node]]:
    """Returns, for each node, the nodes whose values may share memory with its value, in the order of the graph.

    Dynamo's fake tensors share memory as the real ones do.
    """
    root, homes = dict[fx.Node, fx.Node](), dict[object, fx.Node]()

    def first(node: fx.Node) -> fx.Node:
        while root[node] is not node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for node in graph.nodes:
        root[node] = node
        for value in _tensors(node.meta.get("example_value")):
            storage = _storage(value)
            known = node.all_input_nodes if storage is None else [homes.setdefault(storage, node)]
            for other in known:
                root[first(other)] = first(node)
    groups = dict[fx.Node, list[fx.Node]]()
    for node in graph.nodes:
        groups.setdefault(first(node), []).append(node)
    return {node: groups[first(node)] for node in graph.nodes}


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _storage(value: Tensor) -> object:
    """Returns what tells the memory of a tensor from others; None if that is unknown, as under torch.vmap."""
    if is_traceable_wrapper_subclass(value):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
