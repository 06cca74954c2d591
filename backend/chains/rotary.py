"""Rotary position embedding as graphs spell it, for %x [B, H, S, D], or [B, S, H, D]:

    add(mul(%x, %cos), mul(cat([neg(%x[.., D/2:]), %x[.., :D/2]]), %sin))          the halves of a head as pairs
    cat([sub(mul(%lo, %cos), mul(%hi, %sin)), add(mul(%hi, %cos), mul(%lo, %sin))])
    cat([rotated(%x[.., :R]), %x[.., R:]])                                          the first R columns of a head only

%cos and %sin have a row for each position, the same for all heads. RoFormer (Su et al., 2021), section 3.2.2, with the pairs
of GPT-NeoX.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.chains.head_norm import HeadNorm, find_head_norm
from gossamer.backend.chains.heads import ROLES, PerHead, Roles, cut_from, matrix_behind, passed, side_by_side
from gossamer.backend.graph.layout import Layout, follow, merged, path, spans
from gossamer.backend.graph.nodes import arguments, equal, equal_sizes
from gossamer.backend.regions.matrix_functions import Extra

aten = torch.ops.aten


@dataclass(frozen=True)
class Rotation(PerHead):
    """Rotary position embedding of heads by tables of cosines and sines.

    rotated  columns of each head that turn, those of the first half with those of the second; the others are kept
    norm     what comes before, if there is one: its result is the matrix
    """

    rotated: int
    norm: HeadNorm | None


def find_rotation(node: fx.Node) -> Rotation | None:
    """The rotation of heads whose value is this node."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not isinstance(value.shape[-1], int):
        return None
    found = _turned(node)
    if found is None:
        return None
    x, cos, sin, rotated, inner = found
    shape, size = value.shape, value.shape[-1]
    given = x.meta["val"].shape
    if not equal_sizes(given, shape):  # the tables may have more rows than x
        return None
    norm = find_head_norm(path(x)[0])
    for roles in ROLES:
        cut = matrix_behind(x, roles) if norm is None else cut_from(norm, x, roles)
        if cut is None or not equal(cut[0].count, shape[roles[1]]):
            continue
        (heads, views), tables = cut, [_table(table, shape, roles) for table in (cos, sin)]
        first, second = tables
        if first is None or second is None or not equal(columns := first.meta["val"].shape[-1], second.meta["val"].shape[-1]):
            continue
        if columns not in (rotated, rotated // 2):
            continue
        layout = side_by_side(shape, roles, heads.by_position)
        members = (*dict.fromkeys((*views, *passed(inner))), node)
        extras = (Extra(first, "position"), Extra(second, "position"))
        return Rotation(heads, size, node, roles, layout, members, extras, rotated, norm)
    return None


def _turned(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, int, list[fx.Node]] | None:
    """x, cosines, sines, the number of columns that turn, and the nodes between x and this one."""
    whole = _halves_swapped(node) or _halves_apart(node)
    if whole is not None:
        x, cos, sin, inner = whole
        return x, cos, sin, x.meta["val"].shape[-1], inner
    parts = _joined(node)
    if parts is None:
        return None
    found = _halves_swapped(parts[0]) or _halves_apart(parts[0])
    if found is None:
        return None
    first, cos, sin, inner = found
    kept = parts[1]
    x = _base(first)
    rotated, size = first.meta["val"].shape[-1], node.meta["val"].shape[-1]
    if _columns_of(first, x) != (0, rotated) or _columns_of(kept, x) != (rotated, size):
        return None
    return x, cos, sin, rotated, [first, *inner, parts[0], kept]


def _halves_swapped(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, list[fx.Node]] | None:
    """x * cos + cat([-x[half:], x[:half]]) * sin"""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    for straight, crossed in (node.args, reversed(node.args)):
        for swapped, sin in _factors(crossed):
            parts = _joined(swapped)
            if parts is None or parts[0].target is not aten.neg.default:
                continue
            negative, low = parts
            high: Any = negative.args[0]
            for x, cos in _factors(straight):
                half = x.meta["val"].shape[-1] // 2
                if _columns_of(high, x) == (half, 2 * half) and _columns_of(low, x) == (0, half):
                    return x, cos, sin, [high, low, negative, swapped, straight, crossed]
    return None


def _halves_apart(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, list[fx.Node]] | None:
    """cat([low * cos - high * sin, high * cos + low * sin])"""
    parts = _joined(node)
    if parts is None or parts[0].target is not aten.sub.Tensor or parts[1].target is not aten.add.Tensor:
        return None
    if parts[0].kwargs or parts[1].kwargs:
        return None
    (first, second), added = arguments(parts[0]), arguments(parts[1])
    for low, cos in _factors(first):
        for high, sin in _factors(second):
            x = _base(low)
            half = x.meta["val"].shape[-1] // 2
            if x is low or _columns_of(low, x) != (0, half) or _columns_of(high, x) != (half, 2 * half):
                continue
            for third, fourth in (added, reversed(added)):
                if (high, cos) in _factors(third) and (low, sin) in _factors(fourth):
                    return x, cos, sin, [low, high, first, second, third, fourth, *parts]
    return None


def _factors(node: Any) -> list[tuple[fx.Node, fx.Node]]:
    """Both orders of the factors of a product of tensors that have columns."""
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor:
        return []
    a, b = arguments(node)
    return [(a, b), (b, a)] if _has_columns(a) and _has_columns(b) else []


def _has_columns(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() >= 2


def _joined(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two parts of a concatenation of columns."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default:
        return None
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return tuple(parts) if len(parts) == 2 and dim in (-1, node.meta["val"].dim() - 1) else None


def _base(part: fx.Node) -> fx.Node:
    """What a slice or a part of a split is taken from."""
    source = path(part)[-2:][0]
    return source if source is not part and _columns_of(part, source) is not None else part


def _columns_of(part: fx.Node, x: fx.Node) -> tuple[int, int] | None:
    """The columns [low, high) of x that a slice or a part of a split is."""
    nodes = path(part)
    shape, width = x.meta["val"].shape, part.meta["val"].shape[-1]
    whole = Layout.contiguous(shape)
    layout = follow(whole, nodes[nodes.index(x) + 1 :]) if x in nodes else None
    if layout is None or layout.dims[:-1] != whole.dims[:-1] or not spans(layout.dims[-1], width, 1):
        return None
    return layout.offset, layout.offset + width


def _table(node: fx.Node, shape: torch.Size, roles: Roles) -> fx.Node | None:
    """The earliest value that a table of cosines or sines is a view of, with a row for each position."""
    nodes, given = path(node), node.meta["val"].shape
    columns = given[-1]
    if len(given) > 4 or not isinstance(columns, int):
        return None
    sequences, length = shape[roles[0]], shape[roles[2]]
    for start, source in enumerate(nodes):
        have = source.meta["val"]
        layout = follow(Layout.contiguous(have.shape), nodes[start + 1 :])
        if layout is None or layout.offset != 0 or have.dim() < 2 or not equal(have.shape[-1], columns):
            continue
        dims = [*[()] * (4 - len(given)), *layout.dims]
        batch, heads, positions, inside = (merged(dims[role]) for role in roles)
        shared = [not dim or equal(dim[-1].stride, 0) for dim in (batch, heads)]
        if not shared[1] or not spans(positions, length, columns) or not spans(inside, columns, 1):
            continue
        if shared[0] and equal(have.numel(), length * columns):
            return source
        if spans(batch, sequences, length * columns) and equal(have.numel(), sequences * length * columns):
            return source
    return None
