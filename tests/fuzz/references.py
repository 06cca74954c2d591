"""What printed programs of layers are compared with: the same in dense float64."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gossamer.nn as spconv
from gossamer.sparsity.quantization.quantized_linear import QuantizedLinear

Points = tuple[Tensor, Tensor, tuple[int, ...]]
"""Features [N, C], indices [N, 1 + D], and the sizes of a grid."""

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MAXIMA = (F.max_pool1d, F.max_pool2d, F.max_pool3d)


def by_integers(x: Tensor, layer: QuantizedLinear) -> Tensor:
    """The formula of a quantized layer, sums in int64; of `input_offset` it knows nothing."""
    finite = x.isfinite().all(-1, keepdim=True)
    x = torch.where(finite, x.float(), 0)
    if layer.input_scale is None or layer.input_zero_point is None:
        step = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        quantized = (x * (1 / step)).round()
    else:
        step = layer.input_scale
        quantized = (x * (1 / step)).round().clamp(-1000, 1000).add(layer.input_zero_point).clamp(-128, 127)
        quantized -= layer.input_zero_point
    sums = quantized.long() @ layer.weight_int8.long().t()
    y = sums.double() * step * layer.weight_scale
    y = y if layer.bias is None else y + layer.bias
    return torch.where(finite, y, torch.nan)


def by_experts(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Tokens through the matrices [experts, out, in] of their experts, one after the other; zeros behind the last one."""
    parts = [part @ weight.t() for part, weight in zip(x.double().split([*counts]), weights.double(), strict=True)]
    return torch.cat(parts)


def on_grids(layers: nn.Module, features: Tensor, indices: Tensor, shape: tuple[int, ...], batch: int) -> Points:
    """Convolutions of points by those of grids in float64, which are read where there are sites."""
    passed: dict[str | None, tuple[spconv.SparseModule, Tensor, tuple[int, ...]]] = {}
    at, dims = indices, len(shape)
    for layer in layers.children():
        if not isinstance(layer, spconv.SparseModule):
            features = layer(features)
            continue
        window, grid = layer.window, _grid(features, at, shape, batch)
        if "Pool" in type(layer).__name__:
            features, at, shape = _pooled(layer, features, at, shape, batch)
            continue
        weight = layer.weight.double().movedim(-1, 1)
        bias = None if layer.bias is None else layer.bias.double()
        if "Inverse" in type(layer).__name__:
            first, at, to = passed[layer.indice_key]
            window = first.window
            steps = zip(shape, to, window.stride, window.padding, window.dilation, window.kernel, strict=True)
            rest = [size - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for n, size, s, p, d, k in steps]
            steps_back = (window.stride, window.padding, rest, 1, window.dilation)
            full = _TRANSPOSED[dims - 1](grid, weight.transpose(0, 1), bias, *steps_back)
            shape = to
        elif window.transposed:
            steps_back = (window.stride, window.padding, 0, 1, window.dilation)
            full = _TRANSPOSED[dims - 1](grid, weight.transpose(0, 1), bias, *steps_back)
            there = _grid(torch.ones(len(at), 1), at, shape, batch)
            ones = torch.ones(1, 1, *window.kernel, dtype=torch.float64)
            at, shape = (_TRANSPOSED[dims - 1](there, ones, None, *steps_back)[:, 0] > 0.5).nonzero(), tuple(full.shape[2:])
        else:
            full = _CONVOLUTIONS[dims - 1](grid, weight, bias, window.stride, window.padding, window.dilation)
            if "SubM" not in type(layer).__name__:
                passed[layer.indice_key] = layer, at, shape
                there = _grid(torch.ones(len(at), 1), at, shape, batch)
                ones = torch.ones(1, 1, *window.kernel, dtype=torch.float64)
                reached = _CONVOLUTIONS[dims - 1](there, ones, None, window.stride, window.padding, window.dilation)
                at, shape = (reached[:, 0] > 0.5).nonzero(), tuple(full.shape[2:])
        features = full.movedim(1, -1)[tuple(at.long().t())]
    return features, at, shape


def _pooled(layer: spconv.SparseModule, features: Tensor, at: Tensor, shape: tuple[int, ...], batch: int) -> Points:
    """What of the sites there are a window shows: the largest, or their mean."""
    window, dims = layer.window, len(shape)
    there = _grid(torch.ones(len(at), 1), at, shape, batch)
    ones = torch.ones(1, 1, *window.kernel, dtype=torch.float64)
    reached = _CONVOLUTIONS[dims - 1](there, ones, None, window.stride, window.padding)
    if "Max" in type(layer).__name__:
        lowest = _grid(features, at, shape, batch).masked_fill(there == 0, -torch.inf)
        full = _MAXIMA[dims - 1](lowest, window.kernel, window.stride, window.padding)
    else:
        filters = ones.expand(features.shape[1], 1, *window.kernel)
        grid = _grid(features, at, shape, batch)
        full = _CONVOLUTIONS[dims - 1](grid, filters, None, window.stride, window.padding, 1, features.shape[1]) / reached
    at = (reached[:, 0] > 0.5).nonzero()
    return full.movedim(1, -1)[tuple(at.long().t())], at, tuple(full.shape[2:])


def _grid(features: Tensor, at: Tensor, shape: tuple[int, ...], batch: int) -> Tensor:
    grid = torch.zeros(batch, *shape, features.shape[1], dtype=torch.float64)
    return grid.index_put(tuple(at.long().t()), features.double()).movedim(-1, 1)
