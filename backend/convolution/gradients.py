"""Takes gradients of convolutions apart: that of the images becomes a convolution of its own, a transposed one (transposed.py).

%b = convolution_backward(%g, %x, %w, ...)       →    %i = convolution(%g, <w turned around>, ...)
%0, %1 = getitem(%b, 0), getitem(%b, 1)               %1 = getitem(convolution_backward(..., [False, True, False]), 1)

With a stride, zeros are put between pixels: of the result for pointwise filters, of %g for depthwise ones.
"""

import operator
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx

from gossamer.backend.convolution.transposed import Alternative, convolved, padded, slid, spread, whole
from gossamer.backend.graph.emit import Emitter

aten, prims = torch.ops.aten, torch.ops.prims


def ask_for_what_is_used(graph: fx.Graph) -> None:
    """Has convolution_backward compute only the gradients that nodes still use."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        used = {user.args[1] for user in node.users if user.users}
        wanted: Any = node.args[-1]
        node.args = (*node.args[:-1], [asked and number in used for number, asked in enumerate(wanted)])


def take_apart(graph: fx.Graph, static: Container[fx.Node]) -> tuple[list[Alternative], dict[fx.Node, str]]:
    """Replaces gradients of images by convolutions, if their weights are `static` nodes.

    Returns the replacements. For other static weights, returns the reason why their gradient cannot be replaced.
    """
    found, reasons = list[Alternative](), dict[fx.Node, str]()
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


def _of_images(backward: fx.Node, torchs: fx.Node) -> Alternative | str:
    given: Any = backward.args
    g, x, w, _, stride, padding, dilation, transposed, more, groups, _ = given
    kernel, sizes = w.meta["val"].shape, x.meta["val"].shape
    numbers, known = (*kernel, *stride, *padding, *dilation, *more), all(isinstance(n, int) for n in sizes[2:])
    if len(sizes) != len(kernel) or not all(isinstance(n, int) for n in numbers):
        return "no sparse gradient for open sizes of kernels"
    emit, taps, steps = Emitter(torchs), tuple(kernel[2:]), tuple(stride)
    ones, none = [1] * len(taps), [0] * len(taps)
    if transposed:
        found = convolved(emit, g, w, stride, padding, dilation, groups)
        cropped = padded(emit, found, none, [-(n // s) for n, s in zip(more, stride, strict=True)])
        steps, result = (1,) * len(taps), whole(emit, cropped)
    elif any(s != 1 for s in stride) and not known:
        if groups != 1 and groups == kernel[0] == sizes[1]:
            return "no sparse gradient behind a stride of a depthwise convolution for images of open sizes"
        found, result = slid(emit, g, w, stride, padding, dilation, [s - 1 for s in stride], groups)
        for axis, size in enumerate(emit.sizes(x, tuple(range(2, len(sizes)))), 2):  # the last window may end beyond them
            result = emit(aten.slice.Tensor, result, axis, 0, size)
        result = whole(emit, result)
    else:
        depthwise = groups != 1 and groups == kernel[0] == sizes[1]
        pointwise = all(k == 1 for k in taps) and not any(padding)
        more = [
            n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) if s > 1 else 0
            for n, m, k, s, p, d in zip(sizes[2:], g.meta["val"].shape[2:], taps, stride, padding, dilation, strict=True)
        ]
        if pointwise:
            found, result = slid(emit, g, w, ones, none, ones, none, groups)
            result, steps = _spread(emit, result, stride, sizes[2:]), (1,) * len(taps)
        elif depthwise and any(s != 1 for s in stride):
            found = result = _depthwise(emit, g, w, stride, padding, dilation, sizes)
            steps = (1,) * len(taps)
        else:
            found, result = slid(emit, g, w, stride, padding, dilation, more, groups)
    torchs.replace_all_uses_with(result)
    return Alternative(torchs, found, result, taps, steps, True)


def _depthwise(
    emit: Emitter, g: fx.Node, w: fx.Node, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], sizes: Any
) -> fx.Node:
    kernel = w.meta["val"].shape[2:]
    dims = len(kernel)
    around = [d * (k - 1) - p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    g = _spread(emit, g, stride, [n + p - a for n, p, a in zip(sizes[2:], padding, around, strict=True)])
    turned = emit(prims.rev.default, w, list(range(2, dims + 2)))
    ones, none = [1] * dims, [0] * dims
    given = padded(emit, g, around, around) if min(around) < 0 else g
    around = none if min(around) < 0 else around
    return convolved(emit, given, turned, ones, around, dilation, sizes[1])


def _spread(emit: Emitter, images: fx.Node, stride: Sequence[int], sizes: Sequence[int]) -> fx.Node:
    """Puts zeros between the pixels of images, so that they are `stride` apart and fill these sizes."""
    for axis, (step, size) in enumerate(zip(stride, sizes, strict=True), 2):
        images = images if step == 1 else spread(emit, images, axis, step, size)
    return images
