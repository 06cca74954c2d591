"""TorchSparse's names for convolutions of points: its SparseTensor and modules, on the maps and kernels of ours.

SparseTensor, cat               features at int32 coordinates, the number in the batch first (TorchSparse 2.1)
Conv3d                          weight `kernel` [taps, in_channels, out_channels], [in, out] of a single tap
BatchNorm, GroupNorm, ReLU, …   layers of torch on the features

A stride of 1 leads to the same sites. Others lead to those that the window reaches, whose coordinates are divided by the
stride; `transposed` leads back. Odd kernels are centred whatever `padding` is, as there. Weights of TorchSparse fit, in its
order of taps.
"""

from collections.abc import Callable, Sequence
from math import prod, sqrt
from operator import floordiv, mul
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import GossamerError
from gossamer.sparsity.nn.layers import Size, convolved, led, way_from, window_of
from gossamer.sparsity.nn.sparse_conv_tensor import SparseConvTensor
from gossamer.sparsity.nn.windows import Sizes, Window

_GRID, _GRIDS = 1 << 16, 1 << 12
"""Sizes of the grids and their number, as TorchSparse does not ask for them."""


class SparseTensor:
    """Features at places of a batch of grids, with TorchSparse's names.

    feats          [N, C], float32, float64, bfloat16 or float16
    coords         int32 [N, 4], the number in the batch first; no row twice, none negative or above 65535
    stride         how far apart places are on the grid that the first tensor had
    spatial_range  (batch, x, y, z), which `dense` needs
    """

    def __init__(self, feats: Tensor, coords: Tensor, stride: Size = 1, spatial_range: Sequence[int] | None = None) -> None:
        self.sites = SparseConvTensor(feats, coords, [_GRID] * 3, _GRIDS)
        self.stride = _three("stride", stride)
        self.ranges: dict[Sizes, Sizes] = {} if spatial_range is None else {self.stride: tuple(spatial_range)}

    @property
    def feats(self) -> Tensor:
        """[N, C]"""
        return self.sites.features

    @feats.setter
    def feats(self, feats: Tensor) -> None:
        self.sites = self.sites.replace_feature(feats)

    @property
    def coords(self) -> Tensor:
        """int32 [N, 4]"""
        return self.sites.indices

    @property
    def F(self) -> Tensor:
        """[N, C]"""
        return self.feats

    @F.setter
    def F(self, feats: Tensor) -> None:
        self.feats = feats

    @property
    def C(self) -> Tensor:
        """int32 [N, 4]"""
        return self.coords

    @property
    def s(self) -> Sizes:
        """The stride, three numbers."""
        return self.stride

    @property
    def spatial_range(self) -> Sizes | None:
        """(batch, x, y, z) at its stride, None if it was not given."""
        return self.ranges.get(self.stride)

    def at(self, sites: SparseConvTensor, stride: Sizes) -> "SparseTensor":
        """What a layer makes of it."""
        made = object.__new__(SparseTensor)
        made.sites, made.stride, made.ranges = sites, stride, self.ranges
        return made

    def with_feats(self, feats: Tensor) -> "SparseTensor":
        """Other features at the same places."""
        return self.at(self.sites.replace_feature(feats), self.stride)

    def __add__(self, other: "SparseTensor") -> "SparseTensor":
        return self.with_feats(self.feats + other.feats)

    def to(self, *arguments: Any, **named: Any) -> "SparseTensor":
        """`torch.Tensor.to` of the features; on another device with the coordinates, and nothing leads back from there."""
        feats = self.feats.to(*arguments, **named)
        if feats.device == self.coords.device:
            return self.with_feats(feats)
        moved = SparseTensor(feats, self.coords.to(feats.device), self.stride)
        moved.ranges = self.ranges
        return moved

    def half(self) -> "SparseTensor":
        """In float16."""
        return self.to(torch.float16)

    def cpu(self) -> "SparseTensor":
        """On the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = "cuda") -> "SparseTensor":
        """On a GPU."""
        return self.to(device)

    def detach(self) -> "SparseTensor":
        """Without the graph of the features."""
        return self.with_feats(self.feats.detach())

    def dense(self) -> Tensor:
        """[batch, C, x, y, z], zeros elsewhere. GossamerError without a spatial_range."""
        if self.spatial_range is None:
            raise GossamerError("SparseTensor.dense: spatial_range is None, give it (batch, x, y, z) when it is made")
        batch, *sizes = self.spatial_range
        return SparseConvTensor(self.feats, self.coords, sizes, batch).dense()


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Features at the same places, one after the other."""
    return inputs[0].with_feats(torch.cat([each.feats for each in inputs], 1))


class Conv3d(nn.Module):
    """TorchSparse's convolution; `config`, which chooses among its kernels, has no meaning."""

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
        if generative:
            raise GossamerError("Conv3d: generative=True is not there; gossamer.nn.SparseConvTranspose3d makes new sites")
        self.in_channels, self.out_channels, self.transposed = in_channels, out_channels, transposed
        window = window_of(3, kernel_size, stride, padding, dilation)
        centred = tuple((k - 1) // 2 * d for k, d in zip(window.kernel, window.dilation, strict=True))
        if window.padding not in ((0, 0, 0), centred):
            raise GossamerError(
                f"Conv3d: padding is {padding}, must be 0 or {list(centred)}: TorchSparse has the taps there whatever it is"
            )
        self.window = Window(window.kernel, window.stride, centred, window.dilation)
        self.same = max(window.stride) == 1
        if self.same and any(k % 2 == 0 for k in window.kernel):
            raise GossamerError(f"Conv3d: kernel_size {list(window.kernel)} with a stride of 1, must be odd to have a centre")
        self.pointwise, taps = self.same and max(window.kernel) == 1, prod(window.kernel)
        shape = (in_channels, out_channels) if self.pointwise else (taps, in_channels, out_channels)
        self.kernel = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        bound = 1 / sqrt(max(1, (out_channels if transposed else in_channels) * taps))
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        shape = f"kernel_size={list(self.window.kernel)}, stride={list(self.window.stride)}"
        return f"{self.in_channels}, {self.out_channels}, {shape}" + (", transposed=True" if self.transposed else "")

    def forward(self, input: SparseTensor) -> SparseTensor:
        if self.pointwise:
            y = input.feats @ self.kernel
            return input.with_feats(y if self.bias is None else y + self.bias)
        if self.transposed and not self.same:
            return self._back(input)
        sites = input.sites
        if self.same:
            where = (*sites.level.where, self.window.numbers, "same", sites.features.shape[0])
            return input.with_feats(self._convolved(input.feats, where))
        strides = self.window.stride
        sites.passed.setdefault(_key(input.stride), sites.level)
        to = led(self, sites, self.window, None)
        y = self._convolved(input.feats, (*sites.level.where, self.window.numbers, "down", to.indices.shape[0]))
        stride = _each(mul, input.stride, strides)
        if input.spatial_range is not None:
            grids, *sizes = input.spatial_range
            input.ranges.setdefault(stride, (grids, *_each(lambda n, s: -(-n // s), sizes, strides)))
        return input.at(sites.at(y, to), stride)

    def _back(self, input: SparseTensor) -> SparseTensor:
        """To the sites of the finer stride, by the window that led from there."""
        sites, stride = input.sites, _each(floordiv, input.stride, self.window.stride)
        to = sites.passed.get(_key(stride))
        window = None if to is None else way_from(to, sites.level)
        if to is None or window != self.window:
            raise GossamerError(
                f"Conv3d: no convolution with kernel_size={list(self.window.kernel)} and stride={list(self.window.stride)} led "
                f"to these sites from those of the stride {list(stride)}"
            )
        y = self._convolved(input.feats, (*to.where, window.numbers, "up", to.indices.shape[0]))
        return input.at(sites.at(y, to), stride)

    def _convolved(self, features: Tensor, where: tuple[Any, ...]) -> Tensor:
        return convolved(self, features, self._taps(), self.bias, where)

    def _taps(self) -> Tensor:
        """The kernel with the last dimension's taps one after the other; there, those of odd kernels begin with the first."""
        if self.kernel.shape[0] % 2 == 0:
            return self.kernel
        return self.kernel.unflatten(0, self.window.kernel[::-1]).permute(2, 1, 0, 3, 4).flatten(0, 2)


def _three(name: str, value: Size) -> Sizes:
    sizes = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(sizes) != 3:
        raise GossamerError(f"{name} is {value}, must be a number or three")
    return sizes


def _each(function: Callable[[int, int], int], a: Sequence[int], b: Sequence[int]) -> Sizes:
    return tuple(function(x, y) for x, y in zip(a, b, strict=True))


def _key(stride: Sizes) -> str:
    return "x".join(map(str, stride))


class _OnFeatures(nn.Module):
    """A layer of torch that takes the features [N, C]."""

    def forward(self, input: Any) -> Any:
        return input.with_feats(super().forward(input.feats))


class BatchNorm(_OnFeatures, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d on the features."""


class ReLU(_OnFeatures, nn.ReLU):
    """torch.nn.ReLU on the features."""


class LeakyReLU(_OnFeatures, nn.LeakyReLU):
    """torch.nn.LeakyReLU on the features."""


class SiLU(_OnFeatures, nn.SiLU):
    """torch.nn.SiLU on the features."""


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm over the sites of each grid."""

    def forward(self, input: Any) -> Any:
        given = input.feats
        x = (given if given.dtype == torch.float64 else given.float()).unflatten(1, (self.num_groups, -1))
        grid = input.coords[:, 0].long()
        counts = x.new_zeros(_GRIDS, 1).index_add(0, grid, x.new_full((len(x), 1), float(x.shape[2]))).clamp(min=1)

        def mean(values: Tensor) -> Tensor:
            return (x.new_zeros(_GRIDS, self.num_groups).index_add(0, grid, values.sum(2)) / counts)[grid][..., None]

        centred = x - mean(x)
        y = (centred * torch.rsqrt(mean(centred.square()) + self.eps)).flatten(1)
        return input.with_feats((y * self.weight + self.bias if self.affine else y).to(given.dtype))
