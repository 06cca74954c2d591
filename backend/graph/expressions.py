"""Copies the computation of some values out of a graph, as an expression: a graph of its own.

    %t = permute(mul(%weight, %mask), [1, 0])   →   evaluate(weight, mask) = (permute(mul(weight, mask), [1, 0]),)

The leaves of an expression are known before the graph runs, such as weights and edge lists. An expression depends only on its
leaves. So Gossamer evaluates it when the leaves change, not at every call.
"""

import hashlib
import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate

from gossamer.backend.graph.nodes import ancestors, fixed_size, function_of
from gossamer.runtime.torch_internals import OpOverload

T = TypeVar("T")

Place = fx.Node | None

_ON_SIZES = {operator.add, operator.sub, operator.mul, operator.floordiv, torch.sym_sum, torch.sym_max, torch.sym_min}


@dataclass(frozen=True, eq=False)
class Expression:
    """Several values that depend only on leaves.

    leaves    the tensors that `evaluate` takes, in order
    numbers   the sizes that `evaluate` takes after them, in order
    evaluate  leaf values → the values, with None for each place that was None (see `cut`)
    key       hash of the expression: expressions with equal keys compute the same from equal leaves
    """

    leaves: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]
    evaluate: fx.GraphModule
    key: str


def computed_from(graph: fx.Graph, leaves: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the leaves, and the nodes that are computed only from them, by operations without side effects or randomness.

    An operation with several results, such as `_weight_norm_interface` or `topk`, counts, and so does each of its results.
    """
    found = set(leaves)
    for node in graph.nodes:
        if is_pure(node, of_several=True) and all(n in found or fixed_size(n) is not None for n in node.all_input_nodes):
            found.add(node)
    return found


def cut(places: Sequence[Place], leaves: Container[fx.Node]) -> Expression:
    """Returns the expression of some nodes that are computed from leaves. Sizes that guards have fixed become numbers."""
    order = ancestors([p for p in places if p is not None], lambda n: n in leaves or fixed_size(n) is not None)
    copies: dict[fx.Node, Any] = {node: size for node in order if (size := fixed_size(node)) is not None}
    used = [n for n in order if n in leaves and n not in copies]
    numbers = [n for n in used if isinstance(n.meta.get("val"), torch.SymInt)]
    tensors = [n for n in used if n not in numbers]
    graph = fx.Graph()
    for position, leaf in enumerate((*tensors, *numbers)):
        copies[leaf] = graph.placeholder(f"leaf{position}")
    for node in order:
        if node not in copies:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
            copies[node] = graph.call_function(function_of(node), args, kwargs)
    graph.output(tuple(copies[p] if p is not None else None for p in places))
    evaluate = fx.GraphModule({}, graph)
    return Expression(tuple(tensors), tuple(numbers), evaluate, content_key(evaluate))


def content_key(evaluate: fx.GraphModule, *more: object) -> str:
    """Returns a hash of a graph's code, and of further objects that its result depends on."""
    return hashlib.sha256(f"{evaluate.code}{more}".encode()).hexdigest()[:16]


class _Number(int):
    """The number of a node, in the place of the node."""


def to_steps(evaluate: fx.GraphModule) -> list[tuple[str, Any, Any]]:
    """Returns a graph as data that can be pickled. torch's own way to load graphs would evaluate nodes that depend on no leaf,
    and replace them by constants."""
    numbers = {node: _Number(n) for n, node in enumerate(evaluate.graph.nodes)}
    return [
        (
            node.op,
            node.target.name() if isinstance(node.target, OpOverload) else node.target,
            fx.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__),
        )
        for node in numbers
    ]


def from_steps(steps: Sequence[tuple[str, Any, Any]]) -> fx.GraphModule:
    """Returns the graph from the data that `to_steps` returned."""
    graph, made = fx.Graph(), list[fx.Node]()
    for op, target, arguments in steps:
        if op == "call_function" and isinstance(target, str):
            namespace, _, name = target.partition("::")
            packet, _, overload = name.partition(".")
            target = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        args, kwargs = map_aggregate(arguments, lambda each: made[each] if isinstance(each, _Number) else each)
        made.append(graph.create_node(op, target, args, kwargs))
    return fx.GraphModule({}, graph)


def evaluated(evaluate: Callable[..., T], leaves: Sequence[torch.Tensor], numbers: Sequence[int] = ()) -> T:
    """Evaluates an expression on real leaves, without autograd and autocast."""
    with torch.no_grad(), torch.autocast(leaves[0].device.type if leaves else "cpu", enabled=False):
        return evaluate(*leaves, *numbers)


def is_pure(node: fx.Node, of_several: bool = False) -> bool:
    """Whether the value of a node depends only on its arguments, without side effects or randomness."""
    if node.op != "call_function":
        return False
    if node.target in _ON_SIZES or (of_several and node.target is operator.getitem):
        return True
    kinds = torch.Tensor | torch.SymInt | (tuple | list if of_several else torch.Tensor)
    return (
        isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and isinstance(node.meta.get("val"), kinds)
    )


_DRAWS_NOTHING = {"dropout_p": 0, "train": False, "training": False}
"""Arguments with these values turn off the random numbers of an operation."""


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    operation = node.target
    if not isinstance(operation, OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for place, argument in enumerate(operation._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        if argument.name in _DRAWS_NOTHING and given is not None and given == _DRAWS_NOTHING[argument.name]:
            return False
    return True
