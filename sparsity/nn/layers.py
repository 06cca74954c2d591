"""Modules for convolutions of points, with spconv's names, arguments and shapes of weights.

SubMConv{1,2,3,4}d          from sites to the same sites
SparseConv{1,2,3,4}d        to every site that a window leads to
SparseConvTranspose{…}d     to every site that a window leads to, with strides that make the grid finer
SparseInverseConv{1,2,3,4}d back to the input sites of the SparseConv with the same indice_key
SparseSequential, ToDense   runs modules one after the other, with features alone for layers of torch; makes a dense tensor
"""

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import ArgumentError, GossamerError
from gossamer.sparsity.nn.convolve import convolve_sites
from gossamer.sparsity.nn.sparse_conv_tensor import Level, SparseConvTensor
from gossamer.sparsity.nn.windows import Sizes, Window
from gossamer.sparsity.operations.autocast import as_autocast

Size = int | Sequence[int]


class SparseModule(nn.Module):
    """The base of modules that take a SparseConvTensor. SparseSequential gives other modules the features alone."""


class _Convolution(SparseModule):
    dimensions: ClassVar[int]
    transposed: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
    ) -> None:
        super().__init__()
        if groups != 1:
            raise GossamerError(f"{type(self).__name__}: groups is {groups!r}, must be 1, as in spconv")
        self.in_channels, self.out_channels, self.indice_key = in_channels, out_channels, indice_key
        self.window = window_of(self.dimensions, kernel_size, stride, padding, dilation, self.transposed)
        self.weight = nn.Parameter(torch.empty(out_channels, *self.window.kernel, in_channels))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the parameters as torch's convolutions do."""
        bound = 1 / sqrt(max(1, self.in_channels * prod(self.window.kernel)))
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        shape = described(self.window)
        key = "" if self.indice_key is None else f", indice_key={self.indice_key!r}"
        return f"{self.in_channels}, {self.out_channels}, {shape}{key}"

    def _convolved(self, x: SparseConvTensor, where: tuple[Any, ...], window: Window, kind: str, rows: int) -> Tensor:
        if len(x.level.shape) != self.dimensions:
            raise GossamerError(
                f"{type(self).__name__}: the sites have {len(x.level.shape)} dimensions, must have {self.dimensions}"
            )
        weight = self.weight.flatten(1, -2).permute(1, 2, 0)
        return convolved(type(self).__name__, x.features, weight, self.bias, (*where, window.numbers, kind, rows))


class _SubMConv(_Convolution):
    """Convolves to the same sites, each from the sites in the window around it. `padding` and `stride` have no effect."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        kernel, dilation = self.window.kernel, self.window.dilation
        if any(k % 2 == 0 for k in kernel):
            raise GossamerError(f"{type(self).__name__}: kernel_size {list(kernel)}, must be odd to have a centre")
        centred = tuple((k // 2) * d for k, d in zip(kernel, dilation, strict=True))
        self.window = Window(kernel, (1,) * self.dimensions, centred, dilation)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        return x.replace_feature(self._convolved(x, x.level.where, self.window, "same", x.features.shape[0]))


class _SparseConv(_Convolution):
    """Convolves to every site that the window reaches from an input site."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        to = led(x, self.window, self.indice_key)
        return x.at(self._convolved(x, x.level.where, self.window, "down", to.indices.shape[0]), to)


class _SparseInverseConv(_Convolution):
    """Convolves back to the input sites of the convolution with the same `indice_key`."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Size, indice_key: str, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, kernel_size, bias=bias, indice_key=indice_key)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        to = x.passed.get(self.indice_key or "")
        if to is None:
            raise GossamerError(
                f"{type(self).__name__}: no SparseConv with the indice_key {self.indice_key!r} ran before: run it first"
            )
        window = way_from(to, x.level)
        if window is None or window.kernel != self.window.kernel:
            raise GossamerError(
                f"{type(self).__name__}: the SparseConv with the indice_key {self.indice_key!r} does not lead to these sites "
                f"with a kernel_size of {list(self.window.kernel)}: use the kernel_size of that layer, on its result"
            )
        return x.at(self._convolved(x, to.where, window, "up", to.indices.shape[0]), to)


class _SparseConvTranspose(_SparseConv):
    """Convolves to every site that the transposed window reaches: output i * stride - padding + k * dilation of input i."""

    transposed = True


def convolved(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[Any, ...]) -> Tensor:
    """Convolves features [N, C] with a weight [offsets, C, D], in the dtype of torch.autocast if it is on.

    GossamerError if devices, channels or dtypes do not fit.
    """
    if weight.device != x.device:  # else torch takes tensors on "meta" for a traced graph
        raise GossamerError(f"{name}: the weight is on {weight.device}, features are on {x.device}: move one with .to()")
    if x.shape[1] != weight.shape[1]:
        raise GossamerError(f"{name}: {x.shape[1]} channels come in, the weight takes {weight.shape[1]} (in_channels)")
    x, weight = as_autocast(x), as_autocast(weight)
    if weight.dtype != x.dtype:
        raise ArgumentError(f"{name}: features are {x.dtype}, the weight {weight.dtype}: use .to() or torch.autocast")
    return convolve_sites(x, weight, None if bias is None else as_autocast(bias), *where)


def window_of(dimensions: int, kernel: Size, stride: Size, padding: Size, dilation: Size, transposed: bool = False) -> Window:
    """Returns a window with a number for each dimension. GossamerError for numbers that do not fit."""
    sizes = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    kernel, stride, padding, dilation = (_sizes(name, value, dimensions) for name, value in sizes.items())
    return Window(kernel, stride, padding, dilation, transposed)


def way_from(fine: Level, coarse: Level) -> Window | None:
    """Returns the window that leads from one level to another, None if it is not exactly one."""
    windows = Window.parse_several(coarse.path[len(fine.path) :], len(fine.shape))
    return windows[0] if len(windows) == 1 and coarse.path[: len(fine.path)] == fine.path else None


def described(window: Window) -> str:
    """Returns a window as text, for `repr` of modules."""
    return ", ".join(f"{name}={list(value)}" for name, value in vars(window).items() if name != "transposed")


def led(x: SparseConvTensor, window: Window, indice_key: str | None) -> Level:
    """Returns the level to which a layer's window leads, and remembers the level of x under the key for the way back."""
    to = x.led(window)
    if indice_key is not None:
        x.passed[indice_key] = x.level
    return to


def _sizes(name: str, value: Size, dimensions: int) -> Sizes:
    sizes = (value,) * dimensions if isinstance(value, int) else tuple(value)
    least = 0 if name == "padding" else 1
    if len(sizes) != dimensions or min(sizes) < least:
        raise GossamerError(f"{name} is {value}, must be {dimensions} numbers of at least {least}")
    return sizes


class SubMConv1d(_SubMConv):
    """See SubMConv3d."""

    dimensions = 1


class SubMConv2d(_SubMConv):
    """See SubMConv3d."""

    dimensions = 2


class SubMConv3d(_SubMConv):
    """A submanifold convolution: outputs are the input sites. Kernels are odd (Graham et al., 2018).

    The weight is [out_channels, kernel..., in_channels].
    """

    dimensions = 3


class SubMConv4d(_SubMConv):
    """See SubMConv3d."""

    dimensions = 4


class SparseConv1d(_SparseConv):
    """See SparseConv3d."""

    dimensions = 1


class SparseConv2d(_SparseConv):
    """See SparseConv3d."""

    dimensions = 2


class SparseConv3d(_SparseConv):
    """A convolution like torch.nn.Conv3d whose outputs are all sites that a window reaches, in ascending order of their
    indices.
    """

    dimensions = 3


class SparseConv4d(_SparseConv):
    """See SparseConv3d."""

    dimensions = 4


class SparseConvTranspose1d(_SparseConvTranspose):
    """See SparseConvTranspose3d."""

    dimensions = 1


class SparseConvTranspose2d(_SparseConvTranspose):
    """See SparseConvTranspose3d."""

    dimensions = 2


class SparseConvTranspose3d(_SparseConvTranspose):
    """A convolution like torch.nn.ConvTranspose3d whose outputs are all sites that a window reaches, in ascending order."""

    dimensions = 3


class SparseConvTranspose4d(_SparseConvTranspose):
    """See SparseConvTranspose3d."""

    dimensions = 4


class SparseInverseConv1d(_SparseInverseConv):
    """See SparseInverseConv3d."""

    dimensions = 1


class SparseInverseConv2d(_SparseInverseConv):
    """See SparseInverseConv3d."""

    dimensions = 2


class SparseInverseConv3d(_SparseInverseConv):
    """A convolution like torch.nn.ConvTranspose3d whose outputs are the input sites of the convolution with the same
    `indice_key`.
    """

    dimensions = 3


class SparseInverseConv4d(_SparseInverseConv):
    """See SparseInverseConv3d."""

    dimensions = 4


class SparseSequential(nn.Sequential, SparseModule):
    """Runs modules one after the other. Modules that are no SparseModule (norms, activations, nn.Linear) get the features."""

    def forward(self, input: Any) -> Any:
        for module in self:
            if isinstance(module, SparseModule) or not isinstance(input, SparseConvTensor):
                input = module(input)
            else:
                input = input.replace_feature(module(input.features))
        return input


class ToDense(SparseModule):
    """Makes a dense tensor of a SparseConvTensor: its method `dense` as a module."""

    def forward(self, x: SparseConvTensor) -> Tensor:
        return x.dense()
