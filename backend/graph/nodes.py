"""Questions about the nodes of an FX graph: whose copies they are, who uses them, whether their sizes and types are equal.

Sizes are equal where that holds whatever the sizes of inputs are; nothing here makes Dynamo guard one.
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

VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
"""The same values in other dimensions."""

COPIES = {aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
"""The same values in the same dimensions."""

SPREADS = VIEWS | COPIES | {aten.expand.default, aten.unsqueeze.default}
"""The same values, some of them possibly several times."""

_WHOLE = SPREADS | {aten.slice.Tensor}
"""The same values in the same places, where the shape is that of what they are applied to."""


def same(node: Any) -> fx.Node:
    """The node before copies, and before views and slices that have its shape: x[:, None] of an open size slices all of x."""
    while node.target in COPIES or (node.target in _WHOLE and same_shape(node.args[0], node)):
        node = node.args[0]
    return node


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """What a node is called with: its function knows the types."""
    return node.args


def function_of(node: fx.Node) -> Callable[..., Any]:
    """What a node calls."""
    function: Any = node.target
    return function


def of_tensors(node: fx.Node) -> bool:
    """Whether all that a node is computed from are tensors, not numbers or sizes."""
    return all(isinstance(a, fx.Node) and isinstance(a.meta["val"], torch.Tensor) for a in node.args)


def equal(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be the same."""
    return statically_known_true(a == b)


def equal_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


def same_shape(a: Any, b: Any) -> bool:
    return equal_sizes(a.meta["val"].shape, b.meta["val"].shape)


def same_dtype(a: Any, b: Any) -> bool:
    return bool(a.meta["val"].dtype == b.meta["val"].dtype)


def alike(node: fx.Node) -> bool:
    """Whether a node and all that it is computed from are tensors of one shape and type."""
    return of_tensors(node) and all(same_shape(a, node) and same_dtype(a, node) for a in node.args)


def as_long(a: Any, b: Any) -> bool:
    """Whether two tensors have the same first size, whatever that of inputs is."""
    return a.meta["val"].dim() > 0 and b.meta["val"].dim() > 0 and equal_sizes(a.meta["val"].shape[:1], b.meta["val"].shape[:1])


def fixed_size(node: fx.Node) -> int | None:
    """The value of a symbolic size that guards have fixed."""
    return fixed_value(node.meta.get("val"))


def fixed_value(size: Any) -> int | None:
    """The same of the size itself."""
    return size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None


def hint(size: Size) -> int | None:
    """A size, or what it was when it was traced; None if that is not known."""
    found: int | None = size.node.hint if isinstance(size, torch.SymInt) else size
    return found


def hints(sizes: Sequence[Size]) -> list[int] | None:
    """Those of several sizes; None if one is not known."""
    found = [n for size in sizes if (n := hint(size)) is not None]
    return found if len(found) == len(sizes) else None


def phase(node: fx.Node) -> tuple[Any, bool]:
    """What the partitioner goes by when it splits forward from backward."""
    return node.meta.get("partitioner_tag"), bool(node.meta.get("autograd_backward"))


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph was traced by autograd."""
    tag, traced = phase(node)
    return traced or tag == "is_backward"


def is_ours(node: fx.Node) -> bool:
    """Whether a node is a region or one of our operations."""
    return getattr(node.target, "namespace", None) == LIBRARY.ns


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that uses this one, if no other does."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def users(node: fx.Node) -> list[fx.Node]:
    """What uses the value of a node, by way of copies or not."""
    found = []
    for user in node.users:
        found += users(user) if same(user) is same(node) else [user]
    return found


def escapes(start: fx.Node, ends: Collection[fx.Node]) -> bool:
    """Whether a graph returns what is computed from a node otherwise than through some others."""
    seen, pending = {start}, [start]
    while pending:
        ahead = [user for user in pending.pop().users if user not in ends and user not in seen]
        if any(user.op == "output" for user in ahead):
            return True
        seen.update(ahead)
        pending += ahead
    return False


def ancestors(nodes: Sequence[fx.Node], given: Callable[[fx.Node], bool] = lambda _: False) -> list[fx.Node]:
    """The nodes and all they are computed from, producers first. Nothing before what is `given` is looked at."""
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
    """Some nodes, and all that is computed from them."""
    found = set(on)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def between(inputs: Collection[fx.Node], output: fx.Node) -> list[fx.Node]:
    """The nodes that are computed from some inputs on the way to an output, which is one of them. Sizes are none of them."""
    found: dict[fx.Node, None] = {}
    for node in ancestors([output], inputs.__contains__):
        size = isinstance(node.meta.get("val"), torch.SymInt)
        if node not in inputs and not size and any(n in inputs or n in found for n in node.all_input_nodes):
            found[node] = None
    return list(found)


def in_training(graph: fx.Graph) -> bool:
    """Whether it is a joint graph, with gradients."""
    return any(is_tangent(n) for n in graph.nodes)


def is_tangent(node: fx.Node) -> bool:
    """Whether it is a gradient that a joint graph is given, which no node of the forward pass may read."""
    return node.op == "placeholder" and "tangents" in str(node.target)
