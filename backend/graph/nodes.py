"""Answers questions about the nodes of an FX graph: copies, users, and whether sizes and types are equal.

Two sizes count as equal only if they are equal for all sizes of inputs. No function here makes Dynamo add a guard.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from gossamer.runtime.operations import LIBRARY
from gossamer.runtime.torch_internals import statically_known_true

aten = torch.ops.aten

Size = Any
"""An integer, or a symbolic one."""

WIDE_FLOATS = (torch.float32, torch.float64, torch.bfloat16)
"""Types with so large a range that another order of products does not overflow sooner. float16 is not one of them."""

VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
"""Operations that return the same values in other dimensions."""

COPIES = {aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
"""Operations that return the same values in the same dimensions."""

SPREADS = VIEWS | COPIES | {aten.expand.default, aten.unsqueeze.default}
"""Operations that return the same values, some of them possibly several times."""

_WHOLE = SPREADS | {aten.slice.Tensor}
"""Operations that return the same values in the same places if they do not change the shape."""


def same(node: Any) -> fx.Node:
    """Returns the node before copies, and before views and slices that keep its shape. (With a symbolic size, x[:, None]
    begins with a slice of all of x.)"""
    while node.target in COPIES or (node.target in _WHOLE and same_shape(node.args[0], node)):
        node = node.args[0]
    return node


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Returns the arguments of a node as Any, because their types depend on its target."""
    return node.args


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """Returns the argument that a node passes for a parameter of its function."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def function_of(node: fx.Node) -> Callable[..., Any]:
    """Returns the function that a node calls."""
    function: Any = node.target
    return function


def of_tensors(node: fx.Node) -> bool:
    """Whether all arguments of a node are tensors, not numbers or sizes."""
    return all(isinstance(a, fx.Node) and isinstance(a.meta["val"], torch.Tensor) for a in node.args)


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    return statically_known_true(a == b)


def equal_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


def same_shape(a: Any, b: Any) -> bool:
    return equal_sizes(a.meta["val"].shape, b.meta["val"].shape)


def same_dtype(a: Any, b: Any) -> bool:
    return bool(a.meta["val"].dtype == b.meta["val"].dtype)


def alike(node: fx.Node) -> bool:
    """Whether a node and all its arguments are tensors of one shape and type."""
    return of_tensors(node) and all(same_shape(a, node) and same_dtype(a, node) for a in node.args)


def as_long(a: Any, b: Any) -> bool:
    """Whether the first sizes of two tensors are known to be equal."""
    return a.meta["val"].dim() > 0 and b.meta["val"].dim() > 0 and equal_sizes(a.meta["val"].shape[:1], b.meta["val"].shape[:1])


def fixed_size(node: fx.Node) -> int | None:
    """Returns the value of a node that is a symbolic size, if guards have fixed it, or None."""
    return fixed_value(node.meta.get("val"))


def fixed_value(size: Any) -> int | None:
    """Returns the value of a symbolic size, if guards have fixed it, or None."""
    return size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None


def hint(size: Size) -> int | None:
    """Returns a size as a number: for a symbolic size, its value during tracing. Returns None if that is not known."""
    found: int | None = size.node.hint if isinstance(size, torch.SymInt) else size
    return found


def hints(sizes: Sequence[Size]) -> list[int] | None:
    """Returns the hints of several sizes, or None if one is not known."""
    found = [n for size in sizes if (n := hint(size)) is not None]
    return found if len(found) == len(sizes) else None


def phase(node: fx.Node) -> tuple[Any, bool]:
    """Returns the marks by which the partitioner splits forward from backward."""
    return node.meta.get("partitioner_tag"), bool(node.meta.get("autograd_backward"))


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph belongs to the backward pass."""
    tag, traced = phase(node)
    return traced or tag == "is_backward"


def is_ours(node: fx.Node) -> bool:
    """Whether a node calls a region or another operation of Gossamer."""
    return getattr(node.target, "namespace", None) == LIBRARY.ns


def only_user(node: fx.Node) -> fx.Node | None:
    """Returns the only user of a node, or None if it has none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def users(node: fx.Node) -> list[fx.Node]:
    """Returns the users of a node's value. Looks through copies."""
    found = []
    for user in node.users:
        found += users(user) if same(user) is same(node) else [user]
    return found


def escapes(start: fx.Node, ends: Collection[fx.Node]) -> bool:
    """Whether a value computed from `start` reaches the graph's output on a path without any of the nodes `ends`."""
    seen, pending = {start}, [start]
    while pending:
        ahead = [user for user in pending.pop().users if user not in ends and user not in seen]
        if any(user.op == "output" for user in ahead):
            return True
        seen.update(ahead)
        pending += ahead
    return False


def ancestors(nodes: Sequence[fx.Node], given: Callable[[fx.Node], bool] = lambda _: False) -> list[fx.Node]:
    """Returns the nodes and all nodes that they are computed from, producers first. Stops at nodes that are `given`."""
    seen: dict[fx.Node, None] = {}
    stack: list[tuple[fx.Node, bool]] = [(node, False) for node in reversed(nodes)]
    while stack:
        node, done = stack.pop()
        if done:
            seen[node] = None
        elif node not in seen:
            stack.append((node, True))
            stack += [(n, False) for n in reversed(node.all_input_nodes) if not given(node)]
    return list(seen)


def depending(graph: fx.Graph, on: Collection[fx.Node]) -> set[fx.Node]:
    """Returns some nodes, and all nodes that are computed from them."""
    found = set(on)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def between(inputs: Collection[fx.Node], output: fx.Node) -> list[fx.Node]:
    """Returns the nodes on the paths from some inputs to an output, with the output, but without inputs and sizes."""
    found: dict[fx.Node, None] = {}
    for node in ancestors([output], inputs.__contains__):
        size = isinstance(node.meta.get("val"), torch.SymInt)
        if node not in inputs and not size and any(n in inputs or n in found for n in node.all_input_nodes):
            found[node] = None
    return list(found)


def in_training(graph: fx.Graph) -> bool:
    """Whether a graph is a joint graph, with gradients."""
    return any(is_tangent(n) for n in graph.nodes)


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is a tangent: an input of a joint graph that no node of the forward pass may read."""
    return node.op == "placeholder" and "tangents" in str(node.target)
