"""What stands behind views that put batch and heads in one dimension or take that apart, and behind other types and copies.

[batch, heads, queries, keys] and [batch x heads, queries, keys] are the same here.
"""

from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.nodes import COPIES, SPREADS, VIEWS, equal_sizes, same, same_shape

aten, prims = torch.ops.aten, torch.ops.prims

CONVERTS = {prims.convert_element_type.default, aten._to_copy.default}
"""The same values in another type."""

TURNS = {aten.permute.default, aten.transpose.int}


def plain(node: Any) -> fx.Node:
    """The node before copies, views that fold or unfold batch and heads, and other types."""
    while node.target in COPIES | CONVERTS or (node.target in SPREADS and (same_shape(node.args[0], node) or _folds(node))):
        node = node.args[0]
    return node


def _folds(node: fx.Node) -> bool:
    """Whether a view has batch and heads in one dimension, or takes that apart."""
    before, after = (n.meta["val"].shape for n in (node.args[0], node))  # type: ignore[union-attr]
    sizes = {len(before), len(after)}
    return node.target in VIEWS and sizes == {3, 4} and equal_sizes(before[-2:], after[-2:])


def operand(node: Any) -> fx.Node:
    """The value of four dimensions that one of three was folded from, or that one."""
    node = same(node)
    if node.target in VIEWS and _folds(node) and node.args[0].meta["val"].dim() == 4:
        return same(node.args[0])
    return node


def users_of(weights: fx.Node) -> list[tuple[fx.Node, bool, int]]:
    """What takes the weights, whether turned, and as which argument."""
    found, pending, seen = [], [(weights, False)], {weights}
    while pending:
        node, turned = pending.pop()
        for user in node.users:
            swapped = user.target in TURNS and swaps(user)
            if user.target in SPREADS | CONVERTS or swapped:
                if user not in seen:
                    seen.add(user)
                    pending.append((user, turned ^ swapped))
            else:
                found.append((user, turned, next((i for i, a in enumerate(user.args) if a is node), -1)))
    return found


def swaps(node: fx.Node) -> bool:
    """Whether it swaps the last two dimensions, and no others."""
    dims = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    order = list(range(dims))
    order[-2:] = order[:-3:-1]
    if node.target is aten.permute.default:
        return [a % dims for a in node.args[1]] == order  # type: ignore[union-attr]
    return {a % dims for a in node.args[1:]} == {dims - 1, dims - 2}


def is_turned(node: Any, of: Any) -> bool:
    """Whether a node is another one with its last dimensions swapped."""
    node, of = same(node), operand(of)
    if node.target in TURNS and swaps(node) and operand(node.args[0]) is of:
        return True
    return of.target in TURNS and swaps(of) and operand(node) is same(of.args[0])


def is_same(node: Any, other: fx.Node) -> bool:
    """Whether an argument is a node, and has the values of this one."""
    return isinstance(node, fx.Node) and same(node) is same(other)
