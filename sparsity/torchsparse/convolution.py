"""TorchSparse's convolution: the module `Conv3d` and the function `conv3d`.

With a stride of 1 the outputs are the same sites. With other strides they are all sites that the window reaches, with
coordinates divided by the stride; `transposed` leads back. As in TorchSparse, odd kernels are centred whatever `padding` is.
TorchSparse's weights can be loaded, in its order of taps: [taps, in_channels, out_channels], or [in_channels, out_channels] for
a single tap.
"""

from collections.abc import Callable, Sequence
from math import prod, sqrt
from operator import floordiv, mul
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import GossamerError
from gossamer.sparsity.nn.layers import Size, convolved, led, way_from, window_of
from gossamer.sparsity.nn.windows import Sizes, Window
from gossamer.sparsity.operations.autocast import as_autocast
from gossamer.sparsity.torchsparse.tensors import SparseTensor


class Conv3d(nn.Module):
    """TorchSparse's convolution. `config`, which chooses among its kernels, is ignored."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.transposed = in_channels, out_channels, transposed
        self.window = _centred(kernel_size, stride, padding, dilation, generative)
        taps = prod(self.window.kernel)
        shape = (in_channels, out_channels) if _is_pointwise(self.window) else (taps, in_channels, out_channels)
        self.kernel = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        bound = 1 / sqrt(max(1, (out_channels if transposed else in_channels) * taps))
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        shape = f"kernel_size={list(self.window.kernel)}, stride={list(self.window.stride)}"
        return f"{self.in_channels}, {self.out_channels}, {shape}" + (", transposed=True" if self.transposed else "")

    def forward(self, input: SparseTensor) -> SparseTensor:
        return _convolve(input, self.kernel, self.bias, self.window, self.transposed)


def conv3d(
    input: SparseTensor,
    weight: Tensor,
    kernel_size: Size,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    config: Any = None,
    transposed: bool = False,
    generative: bool = False,
    training: bool = False,
) -> SparseTensor:
    """Computes Conv3d with a given weight. `config` and `training` are ignored."""
    window = _centred(kernel_size, stride, padding, dilation, generative)
    return _convolve(input, weight, bias, window, transposed)


def _convolve(input: SparseTensor, kernel: Tensor, bias: Tensor | None, window: Window, transposed: bool) -> SparseTensor:
    if _is_pointwise(window):
        y = input.feats @ kernel
        return input.with_feats(y if bias is None else y + as_autocast(bias))
    sites, stays = input.sites, max(window.stride) == 1
    if transposed and not stays:
        return _back(input, kernel, bias, window)
    weight = _taps(kernel, window)
    if stays:
        weight = weight.flip(0) if transposed else weight  # back along the same windows, whose kernels are odd
        where = (*sites.level.where, window.numbers, "same", sites.features.shape[0])
        return input.with_feats(convolved("Conv3d", input.feats, weight, bias, where))
    sites.passed.setdefault(_key(input.stride), sites.level)
    to = led(sites, window, None)
    y = convolved("Conv3d", input.feats, weight, bias, (*sites.level.where, window.numbers, "down", to.indices.shape[0]))
    stride = _each(mul, input.stride, window.stride)
    if input.spatial_range is not None:
        grids, *sizes = input.spatial_range
        input.ranges.setdefault(stride, (grids, *_each(lambda n, s: -(-n // s), sizes, window.stride)))
    return input.at(sites.at(y, to), stride)


def _back(input: SparseTensor, kernel: Tensor, bias: Tensor | None, window: Window) -> SparseTensor:
    """Convolves back to the sites of the finer stride, by the window that led from there."""
    sites, stride = input.sites, _each(floordiv, input.stride, window.stride)
    to = sites.passed.get(_key(stride))
    way = None if to is None else way_from(to, sites.level)
    if to is None or way != window:
        raise GossamerError(
            f"Conv3d: no convolution with kernel_size={list(window.kernel)} and stride={list(window.stride)} led "
            f"to these sites from those of the stride {list(stride)}: transposed=True undoes such a convolution, "
            "with its arguments"
        )
    where = (*to.where, window.numbers, "up", to.indices.shape[0])
    return input.at(sites.at(convolved("Conv3d", input.feats, _taps(kernel, window), bias, where), to), stride)


def _centred(kernel: Size, stride: Size, padding: Size, dilation: Size, generative: bool) -> Window:
    """Returns a window with TorchSparse's order of taps. GossamerError for options that it or we do not support."""
    if generative:
        raise GossamerError("Conv3d: generative=True is not supported. gossamer.nn.SparseConvTranspose3d makes new sites")
    window = window_of(3, kernel, stride, padding, dilation)
    centred = tuple((k - 1) // 2 * d for k, d in zip(window.kernel, window.dilation, strict=True))
    if window.padding not in ((0, 0, 0), centred):
        raise GossamerError(
            f"Conv3d: padding is {padding}, must be 0 or {list(centred)}: TorchSparse centres the kernel with any padding"
        )
    if max(window.stride) == 1 and any(k % 2 == 0 for k in window.kernel):
        raise GossamerError(f"Conv3d: kernel_size {list(window.kernel)} with a stride of 1, must be odd to have a centre")
    return Window(window.kernel, window.stride, centred, window.dilation)


def _is_pointwise(window: Window) -> bool:
    return max(window.stride) == 1 and max(window.kernel) == 1


def _taps(kernel: Tensor, window: Window) -> Tensor:
    """Returns the kernel with the taps of the last dimension fastest. TorchSparse has the first fastest in odd kernels."""
    if kernel.shape[0] % 2 == 0:
        return kernel
    return kernel.unflatten(0, window.kernel[::-1]).permute(2, 1, 0, 3, 4).flatten(0, 2)


def _each(function: Callable[[int, int], int], a: Sequence[int], b: Sequence[int]) -> Sizes:
    return tuple(function(x, y) for x, y in zip(a, b, strict=True))


def _key(stride: Sizes) -> str:
    return "x".join(map(str, stride))
