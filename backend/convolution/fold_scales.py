"""Folds per-channel sums and products behind a convolution into one product and one sum, such as a batch norm in inference.

%a = sub(%y, %mean)                                %scale = mul(%deviation, %gamma)
%b = mul(%a, %deviation)                           %shift = add(mul(neg(%mean), %scale), %beta)
%c = mul(%b, %gamma)                         →
%d = add(%c, %beta)                                %d = add(mul(%y, %scale), %shift)

A sparse convolution multiplies few times for each number of its result. The four operations on the left would take longer than
it. convolutions.py calls this before it grows a region.
"""

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import is_pure
from gossamer.backend.graph.fusable import kind_of
from gossamer.backend.graph.nodes import only_user

aten = torch.ops.aten

_SUMS, _PRODUCT = {aten.add.Tensor, aten.sub.Tensor}, aten.mul.Tensor
_TYPES = (torch.float32, torch.float64)
_FEWEST = 3


def fold_scales(convolution: fx.Node, static: Container[fx.Node]) -> None:
    """Folds at least three sums and products of a convolution's result with `static` vectors, one number a channel."""
    steps, node = list[tuple[fx.Node, fx.Node]](), convolution
    while (user := only_user(node)) is not None and (other := _by_channel(user, node, static)) is not None:
        steps.append((user, other))
        node = user
    if len(steps) < _FEWEST:
        return
    emit = Emitter(node)
    scale = shift = None
    for step, by in steps:
        if step.target is _PRODUCT:
            scale = by if scale is None else emit(_PRODUCT, scale, by)
            shift = shift and emit(_PRODUCT, shift, by)
        elif shift is None:
            shift = by if step.target is aten.add.Tensor else emit(aten.neg.default, by)
        else:
            shift = emit(step.target, shift, by)
    folded = convolution if scale is None else emit(_PRODUCT, convolution, scale)
    if shift is not None:
        folded = emit(aten.add.Tensor, folded, shift)
    node.replace_all_uses_with(folded)
    for step, _ in reversed(steps):
        step.graph.erase_node(step)


def _by_channel(user: fx.Node, node: fx.Node, static: Container[fx.Node]) -> fx.Node | None:
    """Returns the other operand of a sum or product, if it is a static vector with a number for each channel; else None."""
    value = node.meta["val"]
    if user.target not in (*_SUMS, _PRODUCT) or user.kwargs or value.dtype not in _TYPES:
        return None
    given: Any = user.args
    first, second = given
    other = second if first is node else first
    if first is not node and user.target is aten.sub.Tensor:
        return None
    if not isinstance(other, fx.Node) or not _known(other, static) or other.meta["val"].dtype != value.dtype:
        return None
    return other if kind_of(other, value.shape, 1) == "vector" else None


def _known(node: fx.Node, static: Container[fx.Node]) -> bool:
    return node in static or (is_pure(node) and all(each in static for each in node.all_input_nodes))
