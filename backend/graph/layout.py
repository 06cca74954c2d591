"""Computes where the values of a view are in the matrix that it is a view of.

    %v = view(%m, [B, S, H, D])             (B, S N)  (S, N)  (H, D)  (D, 1)       %m is a matrix [B S, N]
    %p = permute(%v, [0, 2, 1, 3])          (B, S N)  (H, D)  (S, N)  (D, 1)
    %e = expand(unsqueeze(%p, 2), ...)      (B, S N)  (H, D)  (G, 0)  (S, N)  (D, 1)
    %r = view(clone(%e), [B, H G, S, D])    (B, S N)  (H, D) (G, 0)  (S, N)  (D, 1)

An axis is a size and a stride, in elements of the matrix. A dimension of the view has any number of axes, outermost first.
Copies change nothing: strides are always those of the original matrix.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from gossamer.backend.graph.nodes import COPIES, VIEWS, Size, arguments, equal
from gossamer.runtime.torch_internals import statically_known_true

aten = torch.ops.aten

_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


class Axis(NamedTuple):
    """`size` values, each `stride` elements of the matrix after the one before."""

    size: Size
    stride: Size


Dim = tuple[Axis, ...]


@dataclass(frozen=True)
class Layout:
    """The index of the first element in the matrix, and the axes of each dimension."""

    offset: Size
    dims: tuple[Dim, ...]

    @classmethod
    def contiguous(cls, shape: Sequence[Size]) -> "Layout":
        """Returns the layout of a contiguous tensor in its own elements."""
        strides = list(accumulate(reversed(shape), operator.mul, initial=1))[-2::-1] if shape else []
        return cls.strided(shape, strides)

    @classmethod
    def strided(cls, shape: Sequence[Size], strides: Sequence[Size]) -> "Layout":
        """Returns the layout of a strided tensor: one axis for each dimension."""
        return cls(0, tuple(_dim(Axis(size, stride)) for size, stride in zip(shape, strides, strict=True)))


def path(node: fx.Node) -> list[fx.Node]:
    """Returns the chain of views and copies that ends in a node, from its source on. Other nodes are returned alone."""
    found = [node]
    while (source := _step(found[-1])) is not None:
        found.append(source)
    return found[::-1]


def follow(layout: Layout | None, views: list[fx.Node]) -> Layout | None:
    """Returns the layout after some views, from the layout of their source. Returns None if axes cannot describe it."""
    for node in views:
        if layout is None:
            return None
        layout = _after(layout, node)
    return layout


def merged(axes: Iterable[Axis]) -> Dim:
    """Merges axes into as few as possible."""
    found: list[Axis] = []
    for axis in axes:
        if found and equal(found[-1].stride, axis.size * axis.stride):
            found[-1] = Axis(found[-1].size * axis.size, axis.stride)
        else:
            found.append(axis)
    return tuple(found)


def spans(dim: Dim, size: Size, stride: Size) -> bool:
    """Whether a dimension is equal to one axis of this size and stride."""
    axes = merged(dim)
    if equal(size, 1):
        return not axes
    return len(axes) == 1 and equal(axes[0].size, size) and equal(axes[0].stride, stride)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view or a copy that `follow` understands."""
    return _step(node) is not None


def _step(node: fx.Node) -> fx.Node | None:
    """Returns the tensor that a node is a view or a copy of, or None."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return source.args[0] if source.target in _SPLITS else None
    if node.target is aten.cat.default:
        parts: Any = node.args[0]
        filled = [part for part in parts if not equal(part.meta["val"].numel(), 0)]
        return filled[0] if len(filled) == 1 else None
    return arguments(node)[0] if node.target in _FORMS else None


def _after(layout: Layout, node: fx.Node) -> Layout | None:
    form = _part if node.target is operator.getitem else _FORMS[node.target]
    return form(layout, node)


def _same(layout: Layout, node: fx.Node) -> Layout:
    return layout


def _view(layout: Layout, node: fx.Node) -> Layout | None:
    """Distributes the axes among the dimensions, outermost first. Splits an axis if a dimension ends within it."""
    left = [axis for dim in layout.dims for axis in dim]
    dims: list[Dim] = []
    for size in node.meta["val"].shape:
        taken: list[Axis] = []
        while not equal(size, 1):
            if not left:
                return None
            axis = left.pop(0)
            if _divides(axis.size, size):
                taken.append(axis)
                size = size // axis.size
            elif _divides(size, axis.size):
                inner = axis.size // size
                taken.append(Axis(size, axis.stride * inner))
                left.insert(0, Axis(inner, axis.stride))
                size = 1
            else:
                return None
        dims.append(tuple(taken))
    return None if left else replace(layout, dims=tuple(dims))


def _permute(layout: Layout, node: fx.Node) -> Layout:
    order = list(range(len(layout.dims)))
    if node.target is aten.permute.default:
        given: Any = node.args[1]
        order = [n % len(order) for n in given]
    else:
        a, b = (0, 1) if node.target is aten.t.default else arguments(node)[1:3]
        order[a], order[b] = order[b], order[a]
    return replace(layout, dims=tuple(layout.dims[n] for n in order))


def _unsqueeze(layout: Layout, node: fx.Node) -> Layout:
    dims, at = list(layout.dims), node.args[1]
    assert isinstance(at, int)
    dims.insert(at % (len(dims) + 1), ())
    return replace(layout, dims=tuple(dims))


def _squeeze(layout: Layout, node: fx.Node) -> Layout:
    rank, given = len(layout.dims), arguments(node)[1]
    gone = {n % rank for n in ([given] if isinstance(given, int) else given)}
    kept = [dim for n, dim in enumerate(layout.dims) if not (n in gone and not dim)]
    return replace(layout, dims=tuple(kept))


def _expand(layout: Layout, node: fx.Node) -> Layout | None:
    shape = node.meta["val"].shape
    added = len(shape) - len(layout.dims)
    dims = [*[()] * added, *layout.dims]
    repeated = [dim or _dim(Axis(size, 0)) for dim, size in zip(dims, shape, strict=True)]
    return replace(layout, dims=tuple(repeated))


def _select(layout: Layout, node: fx.Node) -> Layout | None:
    return _window(layout, node.args[1], node.args[2], 1, None)


def _slice(layout: Layout, node: fx.Node) -> Layout | None:
    given: Any = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, start, _, step = given
    size = node.meta["val"].shape[dim % len(layout.dims)]
    return _window(layout, dim, start or 0, step, size)


def _part(layout: Layout, node: fx.Node) -> Layout | None:
    """Returns the layout of one part of a split or an unbind."""
    split: Any = node.args[0]
    number: Any = node.args[1]
    rank = len(layout.dims)
    if split.target is aten.unbind.int:
        return _window(layout, split.args[1] if len(split.args) > 1 else 0, number, 1, None)
    dim = (split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)) % rank
    sizes = [part.shape[dim] for part in split.meta["val"]]
    return _window(layout, dim, sum(sizes[:number]), 1, sizes[number])


def _window(layout: Layout, dim: Any, start: Any, step: Any, size: Size | None) -> Layout | None:
    """Takes `size` values of a dimension: every `step`-th from `start` on. If `size` is None, takes one, without dimension."""
    dim %= len(layout.dims)
    if not (isinstance(start, int) and isinstance(step, int)) or start < 0:
        return None
    old = layout.dims[dim]
    if size is not None and step == 1 and start == 0 and equal(prod(axis.size for axis in old), size):
        return layout
    axes = merged(old)
    if len(axes) > 1 or (not axes and start):
        return None
    stride = axes[0].stride if axes else 0
    new = () if size is None else (_dim(Axis(size, stride * step)),)
    return Layout(layout.offset + start * stride, (*layout.dims[:dim], *new, *layout.dims[dim + 1 :]))


def _dim(axis: Axis) -> Dim:
    """Returns a dimension with one axis, or with none if the axis has a single value."""
    return () if equal(axis.size, 1) else (axis,)


def _divides(a: Size, b: Size) -> bool:
    return not equal(a, 0) and statically_known_true(b % a == 0)


_Form = Callable[[Layout, fx.Node], Layout | None]

_FORMS: dict[Any, _Form] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(COPIES, _same),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.cat.default: _same,  # of one tensor and empty ones, as in the first step of a KV cache
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
}
