"""Gradients of convolutions, taken apart: that of the images is a convolution itself, with each kernel turned around.

%b = convolution_backward(%g, %x, %w, ...)       →    %i = convolution(%g, clone(permute(rev(%w))), ...)
%0, %1 = getitem(%b, 0), getitem(%b, 1)               %1 = getitem(convolution_backward(..., [False, True, False]), 1)

With a stride, %g is spread first, zeros between its pixels; behind pointwise kernels what comes out is.
"""

import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gossamer.backend.graph.emit import Emitter

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class ImageGradient:
    """What a gradient of images is by now.

    backward     all gradients of the convolution, by torch
    torchs       the one of images among them
    convolution  what computes it instead
    result       the same, in its place in the graph
    """

    backward: fx.Node
    torchs: fx.Node
    convolution: fx.Node
    result: fx.Node

    def undo(self) -> None:
        """It is computed by torch, as it was."""
        self.result.replace_all_uses_with(self.torchs)


def ask_for_what_is_used(graph: fx.Graph) -> None:
    """Gradients that no node uses by now are not computed."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        used = {user.args[1] for user in node.users if user.users}
        wanted: Any = node.args[-1]
        node.args = (*node.args[:-1], [asked and number in used for number, asked in enumerate(wanted)])


def take_apart(graph: fx.Graph, static: Container[fx.Node]) -> tuple[list[ImageGradient], dict[fx.Node, str]]:
    """Puts convolutions in place of all gradients of images that are one, with weights among the `static` nodes.

    For other such weights the reason why the gradient is none.
    """
    found, reasons = list[ImageGradient](), dict[fx.Node, str]()
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        torchs = next((user for user in node.users if user.target is operator.getitem and user.args[1] == 0), None)
        weight: Any = node.args[2]
        if torchs is not None and weight in static:
            gradient = _of_images(node, torchs)
            if isinstance(gradient, str):
                reasons[weight] = gradient
            else:
                found.append(gradient)
    return found, reasons


def _of_images(backward: fx.Node, torchs: fx.Node) -> ImageGradient | str:
    given: Any = backward.args
    g, x, w, _, stride, padding, dilation, transposed, _, groups, _ = given
    kernel, sizes = w.meta["val"].shape, x.meta["val"].shape
    dims = len(kernel) - 2
    depthwise = groups != 1 and groups == kernel[0] == sizes[1]
    numbers = (*kernel, *stride, *padding, *dilation)
    if transposed or (groups != 1 and not depthwise):
        return f"no sparse gradient for {'transposed convolutions' if transposed else f'{groups} groups'}"
    if len(sizes) != len(kernel) or not all(isinstance(n, int) for n in numbers):
        return "no sparse gradient for open sizes of kernels"
    strided, pointwise = any(s != 1 for s in stride), all(k == 1 for k in kernel[2:]) and not any(padding)
    if strided and (not all(isinstance(n, int) for n in sizes[2:]) or not (pointwise or depthwise)):
        return "no sparse gradient behind a stride"  # most of what a kernel would multiply were zeros
    around = [d * (k - 1) - p for k, d, p in zip(kernel[2:], dilation, padding, strict=True)]
    if min(around) < 0:
        return "no sparse gradient for paddings larger than the kernel"
    emit = Emitter(torchs)
    turned = emit(prims.rev.default, w, list(range(2, dims + 2))) if any(k != 1 for k in kernel[2:]) else w
    if not depthwise:
        turned = emit(aten.permute.default, turned, [1, 0, *range(2, dims + 2)])
        turned = emit(aten.clone.default, turned, memory_format=torch.contiguous_format)
    if strided and not pointwise:
        g = _spread(emit, g, stride, [n + p - a for n, p, a in zip(sizes[2:], padding, around, strict=True)])
    ones, none = [1] * dims, [0] * dims
    found = emit(aten.convolution.default, g, turned, None, ones, around, dilation, False, none, groups)
    result = _spread(emit, found, stride, list(sizes[2:])) if strided and pointwise else found
    torchs.replace_all_uses_with(result)
    return ImageGradient(backward, torchs, found, result)


def _spread(emit: Emitter, images: fx.Node, stride: list[int], sizes: list[int]) -> fx.Node:
    """Images of these sizes with the pixels of others so far apart, and zeros between them."""
    for axis, (step, size) in enumerate(zip(stride, sizes, strict=True), 2):
        if step == 1 and size == images.meta["val"].shape[axis]:
            continue
        shape = emit.sizes(images, tuple(range(images.meta["val"].dim())))
        shape[axis] = size
        value = images.meta["val"]
        zeros = emit(aten.full.default, shape, 0.0, dtype=value.dtype, device=value.device)
        end = (value.shape[axis] - 1) * step + 1
        images = emit(aten.slice_scatter.default, zeros, images, axis, 0, end, step)
    return images
