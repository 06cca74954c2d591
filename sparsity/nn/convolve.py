"""Convolution of features at sites, without an array of pairs x channels.

gossamer::coarse_sites(...) -> Tensor                 the sites that windows lead to
gossamer::convolve_sites(...) -> Tensor               y[o] = bias + the sum over the pairs (i, o) of offset k of x[i] weight[k]
gossamer::convolve_sites_weight(...) -> Tensor        the gradient of the weight
gossamer::sum_sites(...) -> Tensor                    y[o] = the sum over the pairs (i, o) of x[i]
gossamer::largest_sites(...) -> Tensor                the row i of the largest x[i] among the pairs (i, o), for each channel

A convolution reads sites and writes sites: the same ones ("same": Graham et al., "3D semantic segmentation with submanifold
sparse convolutional networks", 2018), those that its window leads to ("down"), or, from those, the ones it came from ("up"). So
the gradient of x is a convolution too. The sites are given as the coordinates that a network begins with, and the windows that
lead from there: whatever a graph computes in between, the maps are found by what does not change.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.errors import DeviceError, GossamerError
from gossamer.runtime.direct_call import describe
from gossamer.runtime.elements import ELEMENTS
from gossamer.runtime.operations import LIBRARY, TAGS, implement, untraced
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.kernels.compile_kernel import compile_region
from gossamer.sparsity.kernels.gpu_kernels import loaded_kernel
from gossamer.sparsity.kernels.warm_memory import empty
from gossamer.sparsity.nn.site_maps import Kind, site_maps
from gossamer.sparsity.nn.sites import PairMap
from gossamer.sparsity.nn.windows import Window
from gossamer.sparsity.operations.derivatives import differentiable

_TILES = 16  # of a map, for torch's operations
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def convolve_ir(dtype: torch.dtype) -> str:
    """(x, weight, bias, inputs, outputs, rows, positions) → y, in f32 or f64."""
    element, words = ELEMENTS[dtype], "tensor<?xi32>"
    matrix, types = f"tensor<?x?x{element}>", f"tensor<?x?x?x{element}>, tensor<?x{element}>"
    return f"""
        func.func @region(%x: {matrix}, %weight: tensor<?x?x?x{element}>, %bias: tensor<?x{element}>, %inputs: {words},
                          %outputs: {words}, %rows: {words}, %positions: tensor<?x?xi32>) -> {matrix} {{
          %y = "kernel.convolve_points"(%x, %weight, %bias, %inputs, %outputs, %rows, %positions)
            : ({matrix}, {types}, {words}, {words}, {words}, tensor<?x?xi32>) -> {matrix}
          return %y : {matrix}
        }}"""


def weight_ir(dtype: torch.dtype) -> str:
    """(x, gradient, inputs, outputs, positions) → the gradient of the weight, in f32 or f64."""
    element, words = ELEMENTS[dtype], "tensor<?xi32>"
    matrix, made = f"tensor<?x?x{element}>", f"tensor<?x?x?x{element}>"
    return f"""
        func.func @region(%x: {matrix}, %gradient: {matrix}, %inputs: {words}, %outputs: {words},
                          %positions: tensor<?x?xi32>) -> {made} {{
          %w = "kernel.convolve_points_grad"(%x, %gradient, %inputs, %outputs, %positions)
            : ({matrix}, {matrix}, {words}, {words}, tensor<?x?xi32>) -> {made}
          return %w : {made}
        }}"""


Run = Callable[[Callable[[torch.dtype], str], Sequence[Tensor], Tensor], None]
"""Has a device's kernel of what is described compute from operands into a result of the type that it is described for."""


@cache
def _kernel(build: Callable[[torch.dtype], str], dtype: torch.dtype) -> RegionKernel:
    return compile_region(build(dtype), schedule="points")


def on_cpu(build: Callable[[torch.dtype], str], operands: Sequence[Tensor], out: Tensor) -> None:
    """`Run` for CPU tensors."""
    _kernel(build, out.dtype).into([out], operands)


def on_cuda(build: Callable[[torch.dtype], str], operands: Sequence[Tensor], out: Tensor) -> None:
    """`Run` for CUDA tensors. DeviceError if the GPU has no kernel."""
    kernel = loaded_kernel(build, (out.dtype,), "points", out.device)
    if kernel is None:
        raise DeviceError(f"convolution of sites: no kernel for {out.device}, there are some from sm_80 on; call .cpu()")
    kernel(operands, out)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _ready(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).contiguous()


def _map(indices: Tensor, shape: Sequence[int], batch: int, path: Sequence[int], window: Sequence[int], kind: Kind) -> PairMap:
    level = Window.parse_several(path, len(shape))
    return site_maps(indices, shape, batch).map(kind, level, Window.parse(window))


def _check_shape(name: str, x: Tensor, *shape: int) -> None:
    """A kernel reads as much as these sizes say."""
    if tuple(x.shape) != shape or x.dtype not in FLOATS:
        raise GossamerError(f"convolution of sites: {name} is {x.dtype} {list(x.shape)}, must be floats {list(shape)}")


def _check_rows(pairs: PairMap, rows: int) -> None:
    if rows != len(pairs.rows):
        raise GossamerError(f"convolution of sites: the result has {rows} rows, there are {len(pairs.rows)} sites")


def _convolve(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None, *sites: Any) -> Tensor:
    *where, rows = sites
    pairs, wide = _map(*where), _wide(x.dtype)
    offsets, (channels, filters) = pairs.positions.shape[0], weight.shape[-2:]
    _check_shape("x", x, pairs.read, channels)
    _check_shape("the weight", weight, offsets, channels, filters)
    if bias is not None:
        _check_shape("the bias", bias, filters)
    _check_rows(pairs, rows)
    out = empty((rows, filters), wide) if x.is_cpu else x.new_empty((rows, filters), dtype=wide)
    if out.numel():
        added = x.new_zeros(filters, dtype=wide) if bias is None else _ready(bias, wide)
        operands = [_ready(x, wide), _ready(weight, wide), added, pairs.inputs, pairs.outputs, pairs.rows, pairs.positions]
        run(convolve_ir, operands, out)
    return out.to(x.dtype)


def _of_weight(run: Run, x: Tensor, gradient: Tensor, *where: Any) -> Tensor:
    pairs, wide = _map(*where), _wide(x.dtype)
    _check_shape("x", x, pairs.read, *x.shape[1:2])
    _check_shape("the gradient", gradient, len(pairs.rows), *gradient.shape[1:2])
    out = x.new_empty((pairs.positions.shape[0], x.shape[1], gradient.shape[1]), dtype=wide)
    if out.numel():
        operands = [_ready(x, wide), _ready(gradient, wide), pairs.inputs, pairs.outputs, pairs.positions]
        run(weight_ir, operands, out)
    return out


def _pooled(pairs: PairMap) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs (inputs, outputs), some tiles of an offset at a time: what is made of them stays in a cache."""
    inputs, outputs = pairs.inputs.long(), pairs.outputs.long()
    ends = pairs.positions[:, -1:]
    for bounds in torch.cat([pairs.positions[:, :-1:_TILES], ends], 1).tolist():
        for first, last in pairwise(bounds):
            if last > first:
                yield inputs[first:last], outputs[first:last]


def _sum(x: Tensor, *sites: Any) -> Tensor:
    *where, rows = sites
    pairs = _map(*where)
    _check_shape("x", x, pairs.read, *x.shape[1:2])
    _check_rows(pairs, rows)
    out, given = x.new_zeros(rows, x.shape[1], dtype=_wide(x.dtype)), _ready(x, _wide(x.dtype))
    for into, to in _pooled(pairs):
        out.index_add_(0, to, given.index_select(0, into))
    return out.to(x.dtype)


def _largest(x: Tensor, *sites: Any) -> Tensor:
    *where, rows = sites
    pairs, given = _map(*where), x.detach().contiguous()
    _check_shape("x", x, pairs.read, *x.shape[1:2])
    _check_rows(pairs, rows)
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


def _fake_convolve(x: Tensor, weight: Tensor, _bias: Tensor | None, *sites: Any) -> Tensor:
    return x.new_empty((sites[-1], weight.shape[2]))


def _fake_of_weight(x: Tensor, gradient: Tensor, _indices: Tensor, shape: Sequence[int], *rest: Any) -> Tensor:
    count = 1
    for size in rest[2][: len(shape)]:
        count *= size
    return x.new_empty((count, x.shape[1], gradient.shape[1]), dtype=_wide(x.dtype))


def _fake_sum(x: Tensor, *sites: Any) -> Tensor:
    return x.new_empty((sites[-1], x.shape[1]))


def _fake_largest(x: Tensor, *sites: Any) -> Tensor:
    return x.new_empty((sites[-1], x.shape[1]), dtype=torch.int64)


def _fake_coarse(indices: Tensor, *_: Any) -> Tensor:
    return indices.new_empty((torch.library.get_ctx().new_dynamic_size(min=0), indices.shape[1]))


_WHERE = "Tensor indices, SymInt[] shape, SymInt batch, SymInt[] path"
_PAIRS = f"{_WHERE}, SymInt[] window, str kind"
ON_CUDA: dict[str, Callable[..., Tensor]] = {
    "coarse_sites": _coarse,
    "convolve_sites": partial(_convolve, on_cuda),
    "convolve_sites_weight": partial(_of_weight, on_cuda),
    "sum_sites": _sum,
    "largest_sites": _largest,
}
"""What CUDA tensors run: the two that are not made of torch's operations have kernels of their own there."""

for _name, _arguments, _cpu, _meta in (
    ("coarse_sites", _WHERE, _coarse, _fake_coarse),
    (
        "convolve_sites",
        f"Tensor x, Tensor weight, Tensor? bias, {_PAIRS}, SymInt rows",
        partial(_convolve, on_cpu),
        _fake_convolve,
    ),
    ("convolve_sites_weight", f"Tensor x, Tensor gradient, {_PAIRS}", partial(_of_weight, on_cpu), _fake_of_weight),
    ("sum_sites", f"Tensor x, {_PAIRS}, SymInt rows", _sum, _fake_sum),
    ("largest_sites", f"Tensor x, {_PAIRS}, SymInt rows", _largest, _fake_largest),
):
    LIBRARY.define(f"{_name}({_arguments}) -> Tensor", tags=TAGS)
    implement(_name, _cpu)
    LIBRARY.impl(_name, untraced(ON_CUDA[_name]), "CUDA")
    describe(_name, _meta)

coarse_sites = torch.ops.gossamer.coarse_sites.default
largest_sites = torch.ops.gossamer.largest_sites.default


# Derivatives

_BACK: dict[str, Kind] = {"same": "same", "down": "up", "up": "down"}


def _turned(gradient: Tensor, weight: Tensor, ctx: Any, indices: Tensor) -> Tensor:
    """The gradient of x: the convolution that leads back."""
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


convolve_sites = differentiable("convolve_sites", _setup, _gradients, _tangent)
convolve_sites_weight = differentiable("convolve_sites_weight", _setup_weight, _gradients_weight, _tangent_weight)
sum_sites = differentiable("sum_sites", _setup_sum, _gradients_sum, _tangent_sum)
