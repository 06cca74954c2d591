"""Recognises rotary position embedding of heads %x, [B, H, S, D] or [B, S, H, D], in these forms:

    add(mul(%x, %cos), mul(cat([neg(%x[.., D/2:]), %x[.., :D/2]]), %sin))          the halves of a head as pairs
    cat([sub(mul(%lo, %cos), mul(%hi, %sin)), add(mul(%hi, %cos), mul(%lo, %sin))])
    cat([rotated(%x[.., :R]), %x[.., R:]])                                          the first R columns of a head only

%cos and %sin have a row for each position, the same for all heads. RoFormer (Su et al., 2021), section 3.2.2, with the pairs
of GPT-NeoX.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from gossamer.backend.chains.head_norm import HeadNorm, find_head_norm
from gossamer.backend.chains.heads import PerHead, Roles, cuts
from gossamer.backend.graph.layout import Layout, follow, merged, path, spans
from gossamer.backend.graph.nodes import between, equal, equal_sizes
from gossamer.backend.graph.patterns import Found, Hole, match, matches, side_by_side
from gossamer.backend.regions.matrix_functions import Extra


@dataclass(frozen=True)
class Rotation(PerHead):
    """Rotary position embedding of heads by tables of cosines and sines.

    rotated  how many columns of each head turn, column n with column n + rotated / 2; the columns behind them are kept
    norm     the norm of heads before the rotation, if there is one. Its result is then the matrix of `heads`
    """

    operation: ClassVar[str] = "rotate"

    rotated: int
    norm: HeadNorm | None

    @property
    def numbers(self) -> dict[str, Any]:
        """The attributes of all such operations, and `rotated`."""
        return {**super().numbers, "rotated": self.rotated}


def _has_columns(of: Any) -> bool:
    value = of.meta.get("val") if isinstance(of, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() >= 2


_X, _LOW, _HIGH, _COS, _SIN = (Hole(name, _has_columns) for name in ("x", "low", "high", "cos", "sin"))

_SWAPPED = _X * _COS + side_by_side(-_HIGH, _LOW) * _SIN
_APART = side_by_side(_LOW * _COS - _HIGH * _SIN, _HIGH * _COS + _LOW * _SIN)
_IN_PART = side_by_side(Hole("turned", _has_columns), Hole("kept", _has_columns))


def find_rotation(node: fx.Node) -> Rotation | None:
    """Returns the rotation whose result is this node; None if there is none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not isinstance(value.shape[-1], int):
        return None
    found = _turned(node) or _turned_in_part(node)
    if found is None or not equal_sizes(found["x"].meta["val"].shape, value.shape):  # the tables may have more rows than x
        return None
    x, rotated = found["x"], found["rotated"]
    norm = find_head_norm(path(x)[0])
    for roles, heads, views in cuts(x, norm):
        tables = [_table(found[name], value.shape, roles) for name in ("cos", "sin")]
        cos, sin = (found[name].meta["val"].shape[-1] for name in ("cos", "sin"))
        if None not in tables and cos == sin and cos in (rotated, rotated // 2):
            members = tuple(dict.fromkeys((*views, *between([x, found["cos"], found["sin"]], node))))
            extras = tuple(Extra(table, "position") for table in tables if table is not None)
            return Rotation(heads, node, roles, members, extras, rotated, norm)
    return None


def _turned(node: fx.Node) -> Found | None:
    """Matches a rotation of all columns. Returns x, cos and sin by name, and under "rotated" the number of columns."""
    for pattern in (_SWAPPED, _APART):
        for found in matches(pattern, node):
            x = found.get("x") or _base(found["low"])
            columns = x.meta["val"].shape[-1]
            halves = (0, columns // 2), (columns // 2, columns)
            pairs = columns % 2 == 0
            if pairs and (_columns_of(found["low"], x), _columns_of(found["high"], x)) == halves:
                return {**found, "x": x, "rotated": columns}
    return None


def _turned_in_part(node: fx.Node) -> Found | None:
    """Matches a rotation of only the first columns. Returns the same as `_turned`."""
    parts = match(_IN_PART, node)
    found = None if parts is None else _turned(parts["turned"])
    if parts is None or found is None:
        return None
    x, rotated = _base(found["x"]), found["rotated"]
    halves = (0, rotated), (rotated, node.meta["val"].shape[-1])
    return {**found, "x": x} if (_columns_of(found["x"], x), _columns_of(parts["kept"], x)) == halves else None


def _base(part: fx.Node) -> fx.Node:
    """Returns the value that a slice or a part of a split is cut from; `part` itself if it is neither."""
    source = path(part)[-2:][0]
    return source if source is not part and _columns_of(part, source) is not None else part


def _columns_of(part: fx.Node, x: fx.Node) -> tuple[int, int] | None:
    """Returns the columns [low, high) of x that `part` is; None if it is no slice of columns."""
    nodes = path(part)
    shape, width = x.meta["val"].shape, part.meta["val"].shape[-1]
    whole = Layout.contiguous(shape)
    layout = follow(whole, nodes[nodes.index(x) + 1 :]) if x in nodes else None
    if layout is None or layout.dims[:-1] != whole.dims[:-1] or not spans(layout.dims[-1], width, 1):
        return None
    return layout.offset, layout.offset + width


def _table(node: fx.Node, shape: torch.Size, roles: Roles) -> fx.Node | None:
    """Returns the earliest value that a table is a view of and that has one row a position; None if there is none."""
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
