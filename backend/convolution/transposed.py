"""Replaces transposed convolutions by convolutions. Gradients of images are transposed convolutions, too (gradients.py).

%y = convolution(%x, %w, %bias, stride [2, 2], ..., transposed)   →   %0 = convolution(%x, <w, turned around and sorted>, ...)
                                                                     %y = add(slice(<interleaved>(%0)), %bias)

With stride s, only every s-th tap reaches output s q + a: the taps a, a + s, ... So each of the s outputs between two pixels
has a filter of its own, which slides over the images with stride 1. These s filters make one convolution, whose results are
interleaved. Taps that are missing at the end of a filter are zeros, which a sparse kernel does not multiply.
"""

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.devices.device_kernel import contiguous_strides
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.nodes import equal, hint
from gossamer.runtime.torch_internals import statically_known_true

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Alternative:
    """A convolution that replaces another node.

    torchs       the node that it replaces
    convolution  the convolution that computes it instead
    result       the value that replaces `torchs`, computed from `convolution`
    kernel       sizes of the filters of `torchs`
    stride       distance of outputs that have the same filter, along each dimension
    backward     whether `torchs` is a gradient
    """

    torchs: fx.Node
    convolution: fx.Node
    result: fx.Node
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    backward: bool

    @property
    def taps(self) -> int:
        """Number of taps of the filters of `torchs`."""
        return prod(self.kernel)

    @property
    def op(self) -> str:
        """Its name in reports."""
        return f"conv {'x'.join(map(str, self.kernel))} {'backward' if self.backward else 'transposed'}"

    def undo(self) -> None:
        """Has torch compute the node again."""
        self.result.replace_all_uses_with(self.torchs)


def of_forward(graph: fx.Graph, static: Container[fx.Node]) -> list[Alternative]:
    """Replaces all transposed convolutions whose weights are `static` nodes and whose filters have known sizes."""
    nodes = graph.find_nodes(op="call_function", target=aten.convolution.default)
    return [_alternative(node) for node in nodes if node.args[6] and node.args[1] in static and _numbers(node)]


def _numbers(node: fx.Node) -> bool:
    given: Any = node.args
    _, w, _, stride, padding, dilation, _, more, _ = given
    return all(isinstance(n, int) for n in (*w.meta["val"].shape, *stride, *padding, *dilation, *more))


def _alternative(node: fx.Node) -> Alternative:
    given: Any = node.args
    x, w, bias, stride, padding, dilation, _, more, groups = given
    emit, kernel = Emitter(node), tuple(w.meta["val"].shape[2:])
    found, result = slid(emit, x, w, stride, padding, dilation, more, groups)
    if bias is not None:
        result = emit(aten.add.Tensor, result, emit(aten.reshape.default, bias, [-1, *[1] * len(kernel)]))
    node.replace_all_uses_with(result)
    return Alternative(node, found, result, kernel, tuple(stride), False)


def slid(
    emit: Emitter,
    x: fx.Node,
    w: fx.Node,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    more: Sequence[int],
    groups: int,
) -> tuple[fx.Node, fx.Node]:
    """Emits a transposed convolution with w [C, M / groups, ...] as a convolution. Returns this, and its interleaved result.

    `more` is the output padding. The other arguments are those of the transposed convolution.
    """
    kernel = w.meta["val"].shape[2:]
    steps = [1 if s > 1 else d for s, d in zip(stride, dilation, strict=True)]
    first, last, crops = list[int](), list[int](), list[tuple[int, int]]()
    for k, s, p, d, m in zip(kernel, stride, padding, dilation, more, strict=True):
        reach, skipped = d * (k - 1) // s, p // s
        begin = p - s * skipped
        length = begin - 2 * p + d * (k - 1) + 1 + m  # end of the result in the interleaved one, minus s (n - 1)
        pixels = -(-length // s)  # that the convolution computes, minus n - 1
        first.append(reach - skipped)
        last.append(pixels - 1 + skipped)
        crops.append((begin, s * pixels - length))
    given = padded(emit, x, first, last)
    ones, none = [1] * len(kernel), [0] * len(kernel)
    found = convolved(emit, given, _filters(emit, w, stride, dilation, groups), ones, none, steps, groups)
    result = _interleaved(emit, found, stride)
    for axis, (begin, surplus) in enumerate(crops, 2):
        if begin or surplus:
            result = emit(aten.slice.Tensor, result, axis, begin, -surplus if surplus else (1 << 63) - 1)
    return found, whole(emit, result)


def convolved(
    emit: Emitter, x: fx.Node, w: fx.Node, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> fx.Node:
    """Emits a convolution without a bias."""
    return emit(aten.convolution.default, x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)


def whole(emit: Emitter, images: fx.Node) -> fx.Node:
    """Returns contiguous images, as torch's convolutions do, because views may follow."""
    value = images.meta["val"]
    places = zip(value.shape, value.stride(), contiguous_strides(value.shape), strict=True)
    if all(equal(size, 1) or equal(stride, wanted) for size, stride, wanted in places):  # is_contiguous asks for unknown sizes
        return images
    return emit(aten.clone.default, images, memory_format=torch.contiguous_format)


def padded(emit: Emitter, x: fx.Node, before: Sequence[int], after: Sequence[int]) -> fx.Node:
    """Pads images with zeros before and after each dimension. A negative number crops that many pixels."""
    around = [n for sides in zip(before[::-1], after[::-1], strict=True) for n in sides]
    for axis, (low, high) in enumerate(zip(before, after, strict=True), 2):
        if low < 0 or high < 0:
            x = emit(aten.slice.Tensor, x, axis, max(0, -low), high if high < 0 else (1 << 63) - 1)
    zeros = [max(0, n) for n in around]
    return emit(aten.constant_pad_nd.default, x, zeros) if any(zeros) else x


def _filters(emit: Emitter, w: fx.Node, stride: Sequence[int], dilation: Sequence[int], groups: int) -> fx.Node:
    """Reorders w [C, M / groups, k ...] into the filters [M s ..., C / groups, taps of one of the s outputs ...]."""
    channels, filters, *kernel = w.meta["val"].shape
    for axis, (s, d) in enumerate(zip(stride, dilation, strict=True)):
        if s > 1 and d > 1:
            w = spread(emit, w, 2 + axis, d, d * (kernel[axis] - 1) + 1)
            kernel[axis] = d * (kernel[axis] - 1) + 1
    dims, taps = len(kernel), [-(-k // s) for k, s in zip(kernel, stride, strict=True)]
    missing = [n for t, s, k in zip(taps[::-1], stride[::-1], kernel[::-1], strict=True) for n in (0, t * s - k)]
    if any(missing):
        w = emit(aten.constant_pad_nd.default, w, missing)
    cut = [n for t, s in zip(taps, stride, strict=True) for n in (t, s)]
    w = emit(aten.reshape.default, w, [groups, channels // groups, filters, *cut])
    w = emit(prims.rev.default, w, list(range(3, 3 + 2 * dims, 2)))
    w = emit(aten.permute.default, w, [0, 2, *range(4, 4 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)])
    w = emit(aten.clone.default, w, memory_format=torch.contiguous_format)
    return emit(aten.reshape.default, w, [groups * filters * prod(stride), channels // groups, *taps])


def _interleaved(emit: Emitter, y: fx.Node, stride: Sequence[int]) -> fx.Node:
    """Reorders images [N, M s ..., q ...] into [N, M, q s ...]."""
    if prod(stride) == 1:
        return y
    dims = len(stride)
    lines = y.meta["val"].shape[2:]
    images, filters, *sizes = emit.sizes(y, tuple(range(2 + dims)))
    assert isinstance(filters, int)
    y = emit(aten.reshape.default, y, [images, filters // prod(stride), *stride, *sizes])
    y = emit(aten.permute.default, y, [0, 1, *(axis for n in range(dims) for axis in (2 + dims + n, 2 + n))])
    joined = [_times(emit, n, s) for n, s in zip(sizes, stride, strict=True)]
    shape = [images, filters // prod(stride), *joined]
    if any(map(_is_guarded, lines, stride)):
        y = emit(aten.clone.default, y, memory_format=torch.contiguous_format)
        return emit(aten.as_strided.default, y, shape, _contiguous(emit, shape))
    return emit(aten.reshape.default, y, shape)


def _is_guarded(lines: Any, step: int) -> bool:
    """Whether a reshape that joins axes of `lines` and `step` indices would add a guard, which users' bounds of sizes forbid.

    Torch asks whether `lines` is a multiple of `lines * step`. It knows the answer for most sizes.
    """
    is_open = isinstance(lines, torch.SymInt) and hint(lines) is not None
    return is_open and step > 1 and not statically_known_true(lines % (lines * step) != 0)


def _contiguous(emit: Emitter, shape: Sequence[int | fx.Node]) -> list[int | fx.Node]:
    """Emits the strides of a contiguous tensor."""
    strides: list[int | fx.Node] = [1]
    for size in shape[:0:-1]:
        strides.insert(0, _times(emit, strides[0], size))
    return strides


def _times(emit: Emitter, a: int | fx.Node, b: int | fx.Node) -> int | fx.Node:
    return a * b if isinstance(a, int) and isinstance(b, int) else emit(operator.mul, a, b)


def spread(emit: Emitter, images: fx.Node, axis: int, step: int, size: int) -> fx.Node:
    """Puts zeros between the lines of images along one axis, so that they are `step` apart. The axis then has `size` lines."""
    value = images.meta["val"]
    if step == 1 and size == value.shape[axis]:
        return images
    shape = emit.sizes(images, tuple(range(value.dim())))
    shape[axis] = size
    zeros = emit(aten.full.default, shape, 0.0, dtype=value.dtype, device=value.device)
    end = (value.shape[axis] - 1) * step + 1
    return emit(aten.slice_scatter.default, zeros, images, axis, 0, end, step)
