"""Where the values of a view lie in the matrix that it was cut from, however it was cut.

    %v = view(%m, [B, S, H, D])             (B, S N)  (S, N)  (H, D)  (D, 1)       %m is a matrix [B S, N]
    %p = permute(%v, [0, 2, 1, 3])          (B, S N)  (H, D)  (S, N)  (D, 1)
    %e = expand(unsqueeze(%p, 2), ...)      (B, S N)  (H, D)  (G, 0)  (S, N)  (D, 1)
    %r = view(clone(%e), [B, H G, S, D])    (B, S N)  (H, D) (G, 0)  (S, N)  (D, 1)

An axis is a size and a stride, in elements of the matrix; a dimension has any number of them, outermost first. Copies do not
count: strides are those of the matrix, wherever the values lie now.
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
    """The element that comes first, and for each dimension of a value its axes."""

    offset: Size
    dims: tuple[Dim, ...]

    @classmethod
    def contiguous(cls, shape: Sequence[Size]) -> "Layout":
        """That of a tensor of this shape in its own elements."""
        strides = list(accumulate(reversed(shape), operator.mul, initial=1))[-2::-1] if shape else []
        return cls.strided(shape, strides)

    @classmethod
    def strided(cls, shape: Sequence[Size], strides: Sequence[Size]) -> "Layout":
        """One axis a dimension."""
        return cls(0, tuple(_dim(Axis(size, stride)) for size, stride in zip(shape, strides, strict=True)))


def path(node: fx.Node) -> list[fx.Node]:
    """The views and copies that end in a node, what they are of first; the node alone if it is neither."""
    found = [node]
    while (source := _step(found[-1])) is not None:
        found.append(source)
    return found[::-1]


def follow(layout: Layout | None, views: list[fx.Node]) -> Layout | None:
    """The layout after some views, given that of what the first one is of; None where it has no axes."""
    for node in views:
        if layout is None:
            return None
        layout = _after(layout, node)
    return layout


def merged(axes: Iterable[Axis]) -> Dim:
    """The same values in as few axes as there can be."""
    found: list[Axis] = []
    for axis in axes:
        if found and equal(found[-1].stride, axis.size * axis.stride):
            found[-1] = Axis(found[-1].size * axis.size, axis.stride)
        else:
            found.append(axis)
    return tuple(found)


def spans(dim: Dim, size: Size, stride: Size) -> bool:
    """Whether a dimension goes through so many values, each `stride` after the one before."""
    axes = merged(dim)
    if equal(size, 1):
        return not axes
    return len(axes) == 1 and equal(axes[0].size, size) and equal(axes[0].stride, stride)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view or a copy of one tensor, as far as layouts are followed."""
    return _step(node) is not None


def _step(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view or a copy of."""
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
    """Axes are dealt out to the dimensions, outermost first, and split where a dimension ends within one."""
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
    """One of the parts of a split or an unbind."""
    split: Any = node.args[0]
    number: Any = node.args[1]
    rank = len(layout.dims)
    if split.target is aten.unbind.int:
        return _window(layout, split.args[1] if len(split.args) > 1 else 0, number, 1, None)
    dim = (split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)) % rank
    sizes = [part.shape[dim] for part in split.meta["val"]]
    return _window(layout, dim, sum(sizes[:number]), 1, sizes[number])


def _window(layout: Layout, dim: Any, start: Any, step: Any, size: Size | None) -> Layout | None:
    """From `start` on every `step`-th of `size` values of a dimension; the dimension vanishes where `size` is None."""
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
    """A dimension of one axis; of none where that has one value only."""
    return () if equal(axis.size, 1) else (axis,)


def _divides(a: Size, b: Size) -> bool:
    return not equal(a, 0) and statically_known_true(b % a == 0)


_Form = Callable[[Layout, fx.Node], Layout | None]

_FORMS: dict[Any, _Form] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(COPIES, _same),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.cat.default: _same,  # of one tensor and empty ones, as a cache of keys begins
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
}
