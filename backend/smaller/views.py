"""Rules for views, copies, pools and splits. They say where the channels of the result lie."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from gossamer.backend.graph.nodes import argument
from gossamer.backend.smaller.analysis import Analysis, Rule, Step
from gossamer.backend.smaller.channels import Channels
from gossamer.runtime.torch_internals import statically_known_true

if TYPE_CHECKING:
    from gossamer.backend.smaller.build import Builder

_FEW = 3
"""A dimension of at most this size holds parts of a fused product (queries, keys, values). A larger one holds heads."""


def kept_in_place(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for copies, which leave channels where they are."""
    x = argument(node, 0, "input")
    given = analysis.channels(x)
    if given is None or node.all_input_nodes != [x]:
        return None
    return Step(given, [x], alias=True)


def pool(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for pools over pixels of a batch. Constants stay constant, but only zeros if the pool may pad with zeros."""
    x = argument(node, 0, "input")
    given, value = analysis.channels(x), node.meta.get("example_value")
    if given is None or given.dims != (1,) or node.all_input_nodes != [x] or not isinstance(value, Tensor):
        return None
    if value.dim() != _DIMS.get(node.target, value.dim()):  # one image without a batch: dimension 1 holds pixels
        return None
    if node.target not in _AVERAGES:
        return Step(given, [x], alias=True)
    zero = analysis.is_zero(given.fill, given.const)
    return Step(replace(given, const=zero), [x], zeros=[(given, zero)])


def mean(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for mean over other dimensions."""
    x = argument(node, 0, "input")
    given, over, keep = analysis.channels(x), argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    if given is None or over is None or node.all_input_nodes != [x]:
        return None
    dims = x.meta["example_value"].dim()
    gone = {each % dims for each in ([over] if isinstance(over, int) else over)}
    if gone & set(given.dims):
        return None
    places = [dim - (0 if keep else sum(each < dim for each in gone)) for dim in given.dims]
    given = given if not_empty(x, gone) else replace(given, const=torch.zeros_like(given.const), fill=None)
    return Step(given.moved(places), [x], alias=True)


def not_empty(node: fx.Node, dims: Iterable[int]) -> bool:
    """Whether a value is known to have elements along some dimensions. The mean of none is NaN."""
    return all(statically_known_true(node.meta["example_value"].shape[dim] > 0) for dim in dims)


def reordered(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for transpose and permute."""
    x = argument(node, 0, "input")
    given = analysis.channels(x)
    if given is None or node.kwargs:
        return None
    dims, name = x.meta["example_value"].dim(), getattr(node.target, "__name__", node.target)
    rest: Any = node.args[1:]
    order = list(range(dims))
    if name in ("transpose", "swapaxes"):
        a, b = (each % dims for each in rest)
        order[a], order[b] = b, a
    else:
        order = [each % dims for each in (rest[0] if isinstance(rest[0], tuple | list) else rest)]
    return Step(given.moved([order.index(dim) for dim in given.dims]), [x], alias=True)


def reshaped(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for view, reshape and flatten of all channels together, perhaps with the dimensions behind them."""
    x = argument(node, 0, "input")
    given = analysis.channels(x)
    value = node.meta.get("example_value")
    if given is None or not isinstance(value, Tensor) or len(x.meta["example_value"].shape) == 0:
        return None
    found = _found_in(given, list(x.meta["example_value"].shape), list(value.shape))
    if found is None:
        return None
    result, repeated = found
    flat = getattr(node.target, "__name__", node.target) == "flatten"
    sizes: Any = () if flat else node.args[1:]
    packed = len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size)
    sizes = list(sizes[0]) if packed else list(sizes)
    if not flat and (len(sizes) != value.dim() or not isinstance(sizes[result.dim], int)):
        return None

    def back(need: Tensor) -> None:
        wanted = (need & ~result.const).reshape(*given.ids.shape, repeated).any(-1)
        analysis.want(x, wanted)

    def build(builder: "Builder") -> fx.Node:
        lines = builder.kept(result)
        if flat or bool(lines.all()) or sizes[result.dim] == -1:
            return builder.same(node)
        smaller = list(builder.mapped(sizes))
        smaller[result.dim] = int(lines.sum())
        args = (builder.small(x), tuple(smaller)) if packed else (builder.small(x), *smaller)
        target: Any = node.target
        make = builder.graph.call_method if node.op == "call_method" else builder.graph.call_function
        return make(target, args)

    fill = given.fill
    if repeated != 1 and fill is not None:
        fill = analysis.recipe(torch.repeat_interleave, analysis.recipe(torch.flatten, fill), repeated)
    if fill is not None:
        result = replace(result, fill=analysis.recipe(torch.reshape, fill, tuple(result.ids.shape)))
    return Step(result, [x], back, build, alias=True)


def _found_in(given: Channels, old: Sequence[Any], new: Sequence[Any]) -> tuple[Channels, int] | None:
    """Returns the channels in a view of other sizes, and how many neighbours there belong to one channel."""
    if len(old) == len(new) and all(_same_number([a], [b]) for a, b in zip(old, new, strict=True)):
        return given, 1
    if list(given.dims) != list(range(given.dims[0], given.dims[-1] + 1)):
        return None
    before, behind = old[: given.dims[0]], old[given.dims[-1] + 1 :]
    sizes = list(given.ids.shape)
    for start in range(len(new) + 1):
        if not _same_number(before, new[:start]):
            continue
        for end in range(start + 1, len(new) + 1):
            inner = new[start:end]
            if not all(isinstance(n, int) for n in inner):
                break
            if prod(inner) == prod(sizes) and _same_number(behind, new[end:]):
                return _arranged(given, 1, start, inner), 1
            fixed = all(isinstance(n, int) for n in behind)
            if fixed and end == len(new) and prod(inner) == prod(sizes) * prod(behind):
                return _arranged(given, prod(behind), start, inner), prod(behind)
    return None


def _arranged(given: Channels, repeated: int, start: int, sizes: Sequence[int]) -> Channels:
    ids, const = (each.flatten().repeat_interleave(repeated).reshape(*sizes) for each in (given.ids, given.const))
    numerous = [n for n, size in enumerate(sizes) if size > (_FEW if len(sizes) > 2 else 1)]
    return Channels(tuple(range(start, start + len(sizes))), ids, numerous[0] if numerous else 0, const, given.fill)


def _same_number(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether sizes have the same product for any values of the dynamic ones."""
    fixed = [prod(n for n in each if isinstance(n, int)) for each in (one, two)]
    open_ = [sorted(str(n) for n in each if not isinstance(n, int)) for each in (one, two)]
    return fixed[0] == fixed[1] and open_[0] == open_[1]


def split(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for chunk and split along channels, whose pieces get shorter independently, and unbind of fused products."""
    x = argument(node, 0, "input")
    given, values = analysis.channels(x), node.meta.get("example_value")
    if given is None or not isinstance(values, tuple | list) or not all(isinstance(each, Tensor) for each in values):
        return None
    name = getattr(node.target, "__name__", node.target)
    dims = x.meta["example_value"].dim()
    dim = argument(node, 1, "dim", 0) % dims if name == "unbind" else argument(node, 2, "dim", 0) % dims
    if dim not in given.dims or (name == "unbind") != (dim != given.dim) or (dim != given.dim and len(values) > _FEW):
        return None
    place = given.dims.index(dim)
    starts, pieces = 0, list[Channels]()
    for value in values:
        size = 1 if name == "unbind" else int(value.shape[dim])
        pieces.append(_piece(analysis, given, place, starts, size, name == "unbind"))
        starts += size
    if starts != given.ids.shape[place]:
        return None

    def back(needs: list[Tensor]) -> None:
        joined = torch.stack(needs, place) if name == "unbind" else torch.cat(needs, place)
        analysis.want(x, joined & ~given.const)

    def build(builder: "Builder") -> fx.Node:
        if name == "unbind" or bool(builder.kept(given).all()):
            return builder.same(node)
        sizes = [int(builder.kept(each).sum()) for each in pieces]
        return builder.graph.call_function(torch.split, (builder.small(x), sizes, dim))

    return Step(pieces, [x], back, build, alias=True)


def _piece(analysis: Analysis, given: Channels, place: int, start: int, size: int, gone: bool) -> Channels:
    cut = slice(start, start + size)
    index = (*[slice(None)] * place, start if gone else cut)
    fill = given.fill
    if fill is not None:
        fill = analysis.recipe(torch.narrow, fill, place, start, size)
        fill = analysis.recipe(torch.squeeze, fill, place) if gone else fill
    dims, along = list(given.dims), given.along
    if gone:
        removed = dims.pop(place)
        dims = [dim - (dim > removed) for dim in dims]
        along -= along > place
    return Channels(tuple(dims), given.ids[index], along, given.const[index], fill)


def item(analysis: Analysis, node: fx.Node) -> Step | None:
    """The rule for x[n]: one of several pieces, or one part of a fused product."""
    source, index = node.args
    step = analysis.steps.get(source) if isinstance(source, fx.Node) else None
    if step is None or not isinstance(index, int):
        return None
    assert isinstance(source, fx.Node)
    if isinstance(step.result, list):
        piece = index % len(step.result)
        return Step(step.result[piece], [source], lambda need: analysis.want(source, need, piece), alias=True)
    given = step.result
    if 0 not in given.dims or given.dim == 0 or given.ids.shape[given.dims.index(0)] > _FEW:
        return None
    place = given.dims.index(0)
    part = index % given.ids.shape[place]

    def back(need: Tensor) -> None:
        whole = torch.zeros_like(given.const)
        whole.select(place, part).copy_(need)
        analysis.want(source, whole & ~given.const)

    return Step(_piece(analysis, given, place, part, 1, True), [source], back, alias=True)


_AVERAGES = {F.avg_pool1d, F.avg_pool2d, F.avg_pool3d}
_DIMS: dict[Any, int] = {
    **dict.fromkeys([F.max_pool1d, torch.max_pool1d, F.adaptive_avg_pool1d, F.avg_pool1d], 3),
    **dict.fromkeys([F.max_pool2d, torch.max_pool2d, F.adaptive_avg_pool2d, F.avg_pool2d], 4),
    **dict.fromkeys([F.max_pool3d, torch.max_pool3d, F.adaptive_avg_pool3d, F.avg_pool3d], 5),
}
"""Dimensions of a batch that a function pools."""

RULES: dict[Any, Rule] = {
    **dict.fromkeys(["contiguous", "clone", "detach", torch.clone], kept_in_place),
    **dict.fromkeys([*_DIMS, F.interpolate], pool),
    **dict.fromkeys([torch.mean, "mean"], mean),
    **dict.fromkeys([torch.transpose, torch.permute, torch.swapaxes, "transpose", "permute", "swapaxes"], reordered),
    **dict.fromkeys(["view", "reshape", "flatten", torch.reshape, torch.flatten], reshaped),
    **dict.fromkeys([torch.chunk, torch.split, torch.unbind, "chunk", "split", "unbind"], split),
    operator.getitem: item,
}
