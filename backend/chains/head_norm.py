"""Norms of each head of queries or keys by itself as graphs spell them, for %x [B, S, H, D], or [B, H, S, D]:

    mul(%w, mul(%x, rsqrt(add(mean(pow(%x, 2), [-1], True), 1e-6))))

Conversions from narrow floats and back may stand between. %w has a number for each column of a head. Query-key
normalization (Henry et al., 2020) by root mean squares, as in Qwen 3 and Gemma 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.chains.heads import ROLES, PerHead, matrix_behind, side_by_side
from gossamer.backend.graph.nodes import COPIES, arguments, equal, same_dtype
from gossamer.backend.regions.matrix_functions import Extra

aten = torch.ops.aten

_CONVERSIONS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default, *COPIES}


@dataclass(frozen=True)
class HeadNorm(PerHead):
    """Each head divided by its root mean square, `eps` added to the mean of the squares; then its columns times a weight."""

    eps: float


def find_head_norm(node: fx.Node) -> HeadNorm | None:
    """The norm of heads whose value is this node."""
    value = node.meta.get("val")
    if node.target not in (aten.mul.Tensor, *_CONVERSIONS) or not isinstance(value, torch.Tensor) or value.dim() != 4:
        return None
    found = _normalized(node)
    if found is None:
        return None
    x, weight, eps, inner = found
    shape, size = value.shape, value.shape[-1]
    for roles in ROLES:
        cut = matrix_behind(x, roles)
        if cut is not None and equal(cut[0].count, shape[roles[1]]):
            heads, views = cut
            layout = side_by_side(shape, roles, heads.by_position)
            members = (*dict.fromkeys((*views, *inner)), node)
            return HeadNorm(heads, size, node, roles, layout, members, (Extra(weight, "vector"),), eps)
    return None


def _normalized(node: fx.Node) -> tuple[fx.Node, fx.Node, float, list[fx.Node]] | None:
    """x, the weight, eps, and the nodes between x and this one."""
    inner: list[fx.Node] = []
    product = _converted(node, inner)
    size = node.meta["val"].shape[-1]
    if product.target is not aten.mul.Tensor or not isinstance(size, int):
        return None
    for weight, scaled in (product.args, product.args[::-1]):
        if not isinstance(weight, fx.Node) or not isinstance(scaled, fx.Node) or tuple(weight.meta["val"].shape) != (size,):
            continue
        inner.append(product)
        quotient = _converted(scaled, inner)
        inner.append(quotient)
        if quotient.target is not aten.mul.Tensor:
            return None
        for x, root in (arguments(quotient), arguments(quotient)[::-1]):
            eps = _root_mean_square(root, x, inner)
            if eps is not None:
                x = _converted(x, inner)
                return (x, weight, eps, inner) if same_dtype(x, node) and not _narrowed(x, inner) else None
    return None


def _narrowed(x: fx.Node, inner: list[fx.Node]) -> bool:
    """Whether something is computed with less precision than x has."""
    size = x.meta["val"].dtype.itemsize
    return any(node.meta["val"].dtype.itemsize < size for node in inner)


def _root_mean_square(root: Any, x: Any, inner: list[fx.Node]) -> float | None:
    """eps of rsqrt(mean(x^2) + eps) over the last dimension; notes the nodes."""
    steps: list[Any] = [root]
    for targets in ((aten.rsqrt.default,), (aten.add.Tensor, aten.add.Scalar), (aten.mean.dim,)):
        if not isinstance(steps[-1], fx.Node) or steps[-1].target not in targets:
            return None
        steps.append(steps[-1].args[0])
    _, added, mean, square = steps
    eps, over = added.args[1], mean.args[1:]
    if not isinstance(eps, float) or over not in (([-1], True), ([3], True)) or added.kwargs or mean.kwargs:
        return None
    if square.args != ((x, 2) if square.target is aten.pow.Tensor_Scalar else (x, x)):
        return None
    if square.target not in (aten.pow.Tensor_Scalar, aten.mul.Tensor):
        return None
    inner += steps
    return eps


def _converted(node: fx.Node, inner: list[fx.Node]) -> fx.Node:
    """What a value was before its type was changed; notes the nodes."""
    while node.target in _CONVERSIONS and set(node.kwargs) <= {"dtype", "memory_format"}:
        inner.append(node)
        node = arguments(node)[0]
    return node
