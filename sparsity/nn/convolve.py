"""Convolves and pools features at sites, without an array of pairs x channels.

gossamer::coarse_sites(...) -> Tensor                 the sites that windows lead to
gossamer::convolve_sites(...) -> Tensor               y[o] = bias + sum over offsets k and their pairs (i, o) of x[i] weight[k]
gossamer::convolve_sites_weight(...) -> Tensor        the gradient of the weight
gossamer::sum_sites(...) -> Tensor                    y[o] = the sum over the pairs (i, o) of x[i]
gossamer::largest_sites(...) -> Tensor                the row i of the largest x[i] among the pairs (i, o), for each channel

A convolution reads sites and writes sites. There are three kinds:

same    writes the sites that it reads (Graham et al., "3D semantic segmentation with submanifold sparse convolutional
        networks", 2018)
down    writes all sites that its window leads to
up      reads such sites, and writes those from which the window led there

So the gradient of x is a convolution, too. Arguments name sites by the coordinates of the network's input and the windows that
lead from there. These do not change between calls, so the maps (site_maps.py) are found by them.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.dialects.points import ConvolvePointsGradOp, ConvolvePointsOp
from gossamer.runtime.memory.warm_memory import empty
from gossamer.runtime.operations import Operation
from gossamer.sparsity.compiler.op_kernels import run
from gossamer.sparsity.nn.site_maps import Kind, site_maps
from gossamer.sparsity.nn.sites import PairMap
from gossamer.sparsity.nn.windows import Window
from gossamer.sparsity.operations.derivatives import Derivative

_TILES = 16  # tiles of a map that torch's operations process at once


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).contiguous()


def _map(indices: Tensor, shape: Sequence[int], batch: int, path: Sequence[int], window: Sequence[int], kind: Kind) -> PairMap:
    level = Window.parse_several(path, len(shape))
    return site_maps(indices, shape, batch).map(kind, level, Window.parse(window))


def _sizes(pairs: PairMap) -> dict[str, int]:
    """Returns the sizes that kernels may read and write."""
    return {"read": pairs.read, "sites": len(pairs.rows), "offsets": pairs.positions.shape[0]}


def _check_rows(pairs: PairMap, x: Tensor, rows: int) -> None:
    if (x.shape[0], rows) != (pairs.read, len(pairs.rows)):
        raise ArgumentError(
            f"pooling of sites: features have {x.shape[0]} rows, results {rows}, must be {pairs.read} and "
            f"{len(pairs.rows)}, a row for each site"
        )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *sites: Any) -> Tensor:
    *where, rows = sites
    pairs, wide = _map(*where), _wide(x.dtype)
    filters = weight.shape[2]
    out = empty((rows, filters), wide) if x.is_cpu else x.new_empty((rows, filters), dtype=wide)
    added = x.new_zeros(filters, dtype=wide) if bias is None else _ready(bias, wide)
    operands = [_ready(x, wide), _ready(weight, wide), added, pairs.inputs, pairs.outputs, pairs.rows, pairs.positions]
    run(ConvolvePointsOp, operands, [out], _sizes(pairs))
    return out.to(x.dtype)


def _of_weight(x: Tensor, gradient: Tensor, *where: Any) -> Tensor:
    pairs, wide = _map(*where), _wide(x.dtype)
    out = x.new_empty((pairs.positions.shape[0], x.shape[1], gradient.shape[1]), dtype=wide)
    operands = [_ready(x, wide), _ready(gradient, wide), pairs.inputs, pairs.outputs, pairs.positions]
    run(ConvolvePointsGradOp, operands, [out], _sizes(pairs))
    return out


def _pooled(pairs: PairMap) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the pairs (inputs, outputs) of some tiles of an offset at a time, so that temporary arrays fit a cache."""
    inputs, outputs = pairs.inputs.long(), pairs.outputs.long()
    ends = pairs.positions[:, -1:]
    for bounds in torch.cat([pairs.positions[:, :-1:_TILES], ends], 1).tolist():
        for first, last in pairwise(bounds):
            if last > first:
                yield inputs[first:last], outputs[first:last]


def _sum(x: Tensor, *sites: Any) -> Tensor:
    *where, rows = sites
    pairs = _map(*where)
    _check_rows(pairs, x, rows)
    out, given = x.new_zeros(rows, x.shape[1], dtype=_wide(x.dtype)), _ready(x, _wide(x.dtype))
    for into, to in _pooled(pairs):
        out.index_add_(0, to, given.index_select(0, into))
    return out.to(x.dtype)


def _largest(x: Tensor, *sites: Any) -> Tensor:
    *where, rows = sites
    pairs, given = _map(*where), x.detach().contiguous()
    _check_rows(pairs, x, rows)
    largest = x.new_full((rows, x.shape[1]), -torch.inf)
    found = x.new_full((rows, x.shape[1]), -1, dtype=torch.int64)
    for into, to in _pooled(pairs):
        new, old, row = given.index_select(0, into), largest.index_select(0, to), found.index_select(0, to)
        better = (new > old) | (row < 0) | (new.isnan() & ~old.isnan())
        largest.index_copy_(0, to, torch.where(better, new, old))
        found.index_copy_(0, to, torch.where(better, into[:, None], row))
    return found


def _coarse(indices: Tensor, shape: Sequence[int], batch: int, path: Sequence[int]) -> Tensor:
    return site_maps(indices, shape, batch).sites(Window.parse_several(path, len(shape))).places.clone()


def _fake_of_weight(x: Tensor, gradient: Tensor, _indices: Tensor, shape: Sequence[int], *rest: Any) -> Tensor:
    count = 1
    for size in rest[2][: len(shape)]:
        count *= size
    return x.new_empty((count, x.shape[1], gradient.shape[1]), dtype=_wide(x.dtype))


def _fake_coarse(indices: Tensor, *_: Any) -> Tensor:
    return indices.new_empty((torch.library.get_ctx().new_dynamic_size(min=0), indices.shape[1]))


# Derivatives

_BACK: dict[str, Kind] = {"same": "same", "down": "up", "up": "down"}


def _turned(gradient: Tensor, weight: Tensor, ctx: Any, indices: Tensor) -> Tensor:
    """Returns the gradient of x: the convolution in the other direction."""
    *geometry, kind = ctx.where
    weight = weight.flip(0) if kind == "same" else weight
    return convolve_sites(gradient, weight.transpose(1, 2), None, indices, *geometry, _BACK[kind], ctx.read)


def _setup(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, weight, bias, indices, *ctx.where, ctx.rows = inputs
    ctx.read, ctx.bias = x.shape[0], None if bias is None else bias.dtype
    return x, weight, indices


def _gradients(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    x, weight, indices = ctx.saved_tensors
    of_x, of_weight, *of_bias = ctx.needs_input_grad[2:-1]
    found = [
        _turned(gradient, weight, ctx, indices) if of_x else None,
        convolve_sites_weight(x, gradient, indices, *ctx.where).to(weight.dtype) if of_weight else None,
    ]
    if ctx.bias is not None:
        found.append(gradient.sum(0, dtype=_wide(gradient.dtype)).to(ctx.bias) if of_bias[0] else None)
    return [*found, None]


def _tangent(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    x, weight, indices = ctx.saved_tensors
    of_x, of_weight, *rest = tangents
    of_bias = rest[0] if ctx.bias is not None else None
    parts = [
        convolve_sites(a, b, None, indices, *ctx.where, ctx.rows)
        for a, b in ((of_x, weight), (x, of_weight))
        if a is not None and b is not None
    ]
    if of_bias is not None:
        parts.append(of_bias.to(x.dtype).expand(ctx.rows, -1))
    return sum(parts[1:], parts[0]) if parts else None


def _setup_weight(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, gradient, indices, *ctx.where = inputs
    ctx.read, ctx.rows = x.shape[0], gradient.shape[0]
    return x, gradient, indices


def _gradients_weight(ctx: Any, upstream: Tensor) -> Sequence[Tensor | None]:
    x, gradient, indices = ctx.saved_tensors
    of_x, of_gradient, _ = ctx.needs_input_grad[2:]
    return [
        _turned(gradient, upstream, ctx, indices) if of_x else None,
        convolve_sites(x, upstream, None, indices, *ctx.where, ctx.rows) if of_gradient else None,
        None,
    ]


def _tangent_weight(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    x, gradient, indices = ctx.saved_tensors
    parts = [
        convolve_sites_weight(a, b, indices, *ctx.where)
        for a, b in ((tangents[0], gradient), (x, tangents[1]))
        if a is not None and b is not None
    ]
    return sum(parts[1:], parts[0]) if parts else None


def _setup_sum(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, indices, *ctx.where, ctx.rows = inputs
    ctx.read = x.shape[0]
    return (indices,)


def _gradients_sum(ctx: Any, gradient: Tensor) -> Sequence[Tensor | None]:
    (indices,) = ctx.saved_tensors
    *geometry, kind = ctx.where
    return [sum_sites(gradient, indices, *geometry, _BACK[kind], ctx.read) if ctx.needs_input_grad[2] else None, None]


def _tangent_sum(ctx: Any, tangents: Sequence[Tensor | None]) -> Tensor | None:
    (indices,) = ctx.saved_tensors
    (of_x, *_) = tangents
    return None if of_x is None else sum_sites(of_x, indices, *ctx.where, ctx.rows)


# The operations, whose CPU functions run on any device

_WHERE = "Tensor indices, SymInt[] shape, SymInt batch, SymInt[] path"
_PAIRS = f"{_WHERE}, SymInt[] window, str kind"
coarse_sites = Operation(f"coarse_sites({_WHERE}) -> Tensor", _coarse, _coarse, _fake_coarse).register()
convolve_sites = Operation(
    "convolve_sites(Tensor x: F[read channels], Tensor weight: f[offsets channels filters], Tensor? bias: f[filters], "
    f"{_PAIRS}, SymInt rows) -> Tensor: F[rows filters]",
    _convolve,
    _convolve,
    derivative=Derivative(_setup, _gradients, _tangent),
).register()
convolve_sites_weight = Operation(
    f"convolve_sites_weight(Tensor x: f[read channels], Tensor gradient: f[sites filters], {_PAIRS}) -> Tensor",
    _of_weight,
    _of_weight,
    _fake_of_weight,
    Derivative(_setup_weight, _gradients_weight, _tangent_weight),
).register()
sum_sites = Operation(
    f"sum_sites(Tensor x: F[read channels], {_PAIRS}, SymInt rows) -> Tensor: F[rows channels]",
    _sum,
    _sum,
    derivative=Derivative(_setup_sum, _gradients_sum, _tangent_sum),
).register()
largest_sites = Operation(
    f"largest_sites(Tensor x: f[read channels], {_PAIRS}, SymInt rows) -> Tensor: i64[rows channels]", _largest, _largest
).register()
