"""Recognises gradients of filters that a mask multiplies, and predicts the gain of computing only the elements that it keeps.

getitem(convolution_backward(%g, %x, ...), 1) * %mask    →    gossamer::masked_filter_gradient(%g, %x, %mask, ...)

The gradient of a transposed convolution's filters is that of the convolution from its results to its images.
weights/masked_gradients.py calls this.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.devices.device import device_of
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import hint, hints
from gossamer.backend.measuring.convolution_times import filter_gradient_us
from gossamer.backend.run.masked_filters import Line, masked_filter_gradient
from gossamer.runtime.elements import FLOATS

aten = torch.ops.aten

_TYPES = (torch.float32, torch.float64)
_VECTOR, _PIECE, _ENTRY = 1.1, 6.0, 6.0  # cycles of an entry: for each vector of pixels, for eight such vectors, and once
_READ, _WRITE = 1 / 3, 1 / 2  # shares of the time of a copy: to read images, and to write a result that is mostly zeros
_DENSE = 0.6  # cycles of a dense multiply-add of vectors


@dataclass(frozen=True)
class FilterGradient:
    """The sums over images n and pixels q of g[n, m, q] x[n, c, pixel of tap k for q], for (m, c, k) that the mask keeps."""

    g: fx.Node
    x: fx.Node
    mask: fx.Node
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def pixels(self) -> int | None:
        """Pixels of g in all images; None if unknown."""
        shape = self.g.meta["val"].shape
        sizes = hints([shape[0], *shape[2:]])
        return None if sizes is None else prod(sizes)

    def emitted(self, emit: Emitter) -> fx.Node:
        """Emits it as one operation."""
        return emit(masked_filter_gradient, self.g, self.x, self.mask, self.stride, self.padding, self.dilation, self.groups)

    def gain(self, entries: int) -> float | None:
        """Predicts the gain over torch if the mask keeps so many entries; None for images of unknown sizes."""
        sizes = [[hint(n) for n in each.meta["val"].shape] for each in (self.g, self.x)]
        if any(None in each for each in sizes) or 0 in (*sizes[0], *sizes[1]):
            return None
        g, x = ([n or 1 for n in each] for each in sizes)
        mask = self.mask.meta["val"]
        dense = filter_gradient_us(g, x, mask.shape, mask.dtype, self.stride, self.padding, self.dilation, self.groups)
        lanes = device_of(mask.device).bits // (8 * mask.dtype.itemsize)
        cycles_a_us = this_machine().speeds[FLOATS[mask.dtype]].cycles_a_us("rowpairs", prod([g[0], *g[2:]]))
        cycles_a_us *= torch.get_num_threads()
        if dense is None:
            dense = prod([*g, *mask.shape[1:]]) / lanes * _DENSE / cycles_a_us
        sums = entries * self._cycles(g, x, lanes) / cycles_a_us
        return dense / (sums + self._memory_us(g, x) + this_machine().call_us)

    def _line(self, g: Sequence[int], x: Sequence[int]) -> Line:
        return Line.of(g[2:], x[2:], self.mask.meta["val"].shape[2:], self.stride, self.padding, self.dilation)

    def _cycles(self, g: Sequence[int], x: Sequence[int], lanes: int) -> float:
        """Returns the cycles of an entry."""
        line = self._line(g, x)
        lines, length = (g[0], prod(g[2:])) if line.plain else (1, g[0] * prod(line.length))
        vectors = -(-length // lanes)
        return _ENTRY + lines * (_VECTOR * vectors + _PIECE * -(-vectors // 8))

    def _memory_us(self, g: Sequence[int], x: Sequence[int]) -> float:
        """Returns the microseconds to read images, or to copy them into a line, and to write the result, on one thread."""
        line, mask = self._line(g, x), self.mask.meta["val"]
        if line.plain:
            moved = _READ * (prod(g) + prod(x))
        else:
            moved = g[1] * g[0] * prod(line.length) + x[1] * len(line.phases) * line.elements(x[0])
        return device_of(mask.device).transpose_us(int((moved + _WRITE * mask.numel()) * mask.dtype.itemsize))


def is_multiplied(backward: fx.Node) -> bool:
    """Whether a `convolution_backward` gives one gradient alone, which goes into a product, as that under a mask does."""
    users = [user for user in backward.users if user.users]
    products = [user for each in users for user in each.users]
    return all(each.args[1] == 1 for each in users) and all(each.target is aten.mul.Tensor for each in products)


def gradient_of(product: fx.Node, mask: fx.Node) -> FilterGradient | None:
    """Returns the gradient that `product` times `mask` is; None if `product` is no gradient of filters."""
    if product.target is not operator.getitem or product.args[1] != 1 or len(product.users) > 1:
        return None
    backward: Any = product.args[0]
    if backward.target is not aten.convolution_backward.default:
        return None
    g, x, w, _, stride, padding, dilation, transposed, _, groups, _ = backward.args
    values = [each.meta["val"] for each in (g, x, product, mask)]
    kernel = values[3].shape
    alike = values[2].shape == kernel == w.meta["val"].shape and len({(each.dtype, each.device.type) for each in values}) == 1
    if not alike or values[0].dim() != len(kernel) or not values[0].is_cpu or values[0].dtype not in _TYPES:
        return None
    dims = len(kernel) - 2
    how = [list(each) * dims if len(each) == 1 else list(each) for each in (stride, padding, dilation)]
    if not all(isinstance(n, int) for n in (*kernel, *how[0], *how[1], *how[2])):
        return None
    if transposed:
        g, x = x, g
    return FilterGradient(g, x, mask, how[0], how[1], how[2], groups)
