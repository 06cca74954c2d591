"""Questions about single nodes of an FX graph: what they are copies of, and whether their sizes and types are equal.

Sizes are equal where that holds whatever the sizes of inputs are; nothing here makes Dynamo guard one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gossamer.runtime.torch_internals import statically_known_true

aten = torch.ops.aten

_SAME = {aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


def same(node: Any) -> fx.Node:
    """The node before copies."""
    while node.target in _SAME or (node.target is aten.expand.default and same_shape(node.args[0], node)):
        node = node.args[0]
    return node


def of_tensors(node: fx.Node) -> bool:
    """Whether all that a node is computed from are tensors, not numbers or sizes."""
    return all(isinstance(a, fx.Node) and isinstance(a.meta["val"], torch.Tensor) for a in node.args)


def equal_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(statically_known_true(p == q) for p, q in zip(a, b, strict=True))


def same_shape(a: Any, b: Any) -> bool:
    return equal_sizes(a.meta["val"].shape, b.meta["val"].shape)


def same_dtype(a: Any, b: Any) -> bool:
    return bool(a.meta["val"].dtype == b.meta["val"].dtype)


def as_long(a: Any, b: Any) -> bool:
    """Whether two tensors have the same first size, whatever that of inputs is."""
    return a.meta["val"].dim() > 0 and b.meta["val"].dim() > 0 and equal_sizes(a.meta["val"].shape[:1], b.meta["val"].shape[:1])
