"""Replaces values that depend only on edge lists or patterns. They are computed when these are new, not at every call.

%d = reciprocal(scatter_add(zeros, 0, %target, ones))    →    %d = gossamer::structure([%target], [], [%n], "3f2a…")
"""

from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import Expression
from gossamer.backend.graph.inputs import noticed
from gossamer.backend.graph.nodes import equal
from gossamer.backend.report.options import Verify
from gossamer.backend.run import message_ops

aten = torch.ops.aten


def remembered(node: fx.Node, expression: Expression, verify: Verify) -> fx.Node | None:
    """Emits a node with the remembered value of `node`. Returns None if the value's size is unknown before it is computed."""
    value, emit = node.meta["val"], Emitter(node, {})
    sizes = [_size(size, expression, emit) for size in value.shape]
    if None in sizes:
        return None
    key = message_ops.structure_value(expression, noticed(expression.leaves, verify), value.dtype)
    return emit(message_ops.structure, list(expression.leaves), list(expression.numbers), sizes, key)


def _size(wanted: Any, expression: Expression, emit: Emitter) -> int | fx.Node | None:
    """Returns a size as a number or a node: one of the expression's numbers, or a size of a leaf. None if neither has it."""
    if isinstance(wanted, int):
        return wanted
    for number in expression.numbers:
        if equal(number.meta["val"], wanted):
            return number
    for leaf in expression.leaves:
        for dim, size in enumerate(leaf.meta["val"].shape):
            if equal(size, wanted):
                return emit(aten.sym_size.int, leaf, dim)
    return None
