"""Finds the convolutions of a graph whose weight is computed from static tensors, or says why no kernel computes one."""

from collections.abc import Mapping
from dataclasses import replace
from operator import add
from typing import Any

import torch
from torch import fx

from gossamer.backend.convolution.convolution import Convolution, sizes_along
from gossamer.backend.convolution.plan_window import planned
from gossamer.backend.convolution.transposed import Alternative
from gossamer.backend.graph.emit import Emitter
from gossamer.backend.graph.expressions import computed_from
from gossamer.backend.graph.weight_expressions import Weight, weight_behind
from gossamer.dialects.window import Window
from gossamer.runtime.elements import FLOATS

aten = torch.ops.aten


def find(
    graph: fx.Graph, values: Mapping[fx.Node, torch.Tensor], instead: Mapping[fx.Node, Alternative]
) -> list[tuple[fx.Node, Convolution | str]]:
    """Returns the nodes of convolutions with static weights, in order, each as a `Convolution` or with the reason why no kernel
    computes it. The keys of `instead` are convolutions that replace another node of torch's."""
    known = dict(values)
    static = computed_from(graph, known)
    nodes = [n for n in graph.nodes if n.target is aten.convolution.default and n.args[1] in static and n.users]
    return [(node, _convolution(node, known, instead.get(node))) for node in nodes]


def _convolution(node: fx.Node, values: dict[fx.Node, torch.Tensor], instead: Alternative | None) -> Convolution | str:
    given: Any = node.args
    x, w, _, stride, padding, dilation, transposed, _, groups = given
    value = x.meta["val"]
    if value.dtype not in FLOATS or not value.is_cpu:
        return f"no sparse kernel for convolutions in {str(value.dtype).removeprefix('torch.')} on {value.device.type}"
    images, kernel = value.shape, w.meta["val"].shape
    if transposed or not all(isinstance(n, int) for n in (*kernel, *stride, *padding, *dilation)):
        what = "its output size or the sizes of its kernel" if transposed else "the sizes of its kernel"
        return f"{what} are unknown at compile time"
    if len(images) != len(kernel):
        return "no sparse kernel for a convolution of a single image without a batch"
    around = _zeros_around(x, len(padding))
    before, after = (padding, padding) if around is None else ([*map(add, side, padding)] for side in around)
    source = x if around is None else x.args[0]
    taps, steps, apart = (sizes_along(numbers, 1) for numbers in (kernel[2:], stride, dilation))
    window = Window(taps, steps, apart, sizes_along(before, 0), sizes_along(after, 0))
    depthwise = groups != 1 and groups == kernel[0] == images[1] and len(kernel) < 5 and stride[-1] < 3
    if not depthwise:
        sizes = source.meta["val"].shape[2:]
        known = not window.pointwise and all(isinstance(n, int) for n in sizes)
        window = replace(window, images=sizes_along(sizes, 1) if known else (0, 0, 0), groups=groups)
    m, k = kernel[0], kernel[1] * window.taps
    weight = _weight_of(node, w, [m, k], values)
    if weight is None:
        return "its weight cannot be seen as a matrix"
    found = Convolution(
        node, source, weight, "left", m, k, None, 1, 1, window=window, depthwise=depthwise, padded=around is not None,
        instead=instead,
    )  # fmt: skip
    return found if depthwise else replace(found, window=planned(found))


def _weight_of(node: fx.Node, w: fx.Node, sizes: list[int], values: dict[fx.Node, torch.Tensor]) -> Weight | None:
    """Returns the filters of a convolution as a matrix of these sizes; None if they cannot be seen as one."""
    matrix = Emitter(node)(aten.reshape.default, w, sizes)
    weight = weight_behind(matrix, values)
    node.graph.erase_node(matrix)
    return None if weight is None or weight.transposed or 0 in weight.shape else weight


def _zeros_around(x: fx.Node, dims: int) -> tuple[list[int], list[int]] | None:
    """Returns how many zeros were padded to an input before and after each of its last `dims` dimensions; None if none were."""
    if x.target is not aten.constant_pad_nd.default:
        return None
    given: Any = x.args
    _, around, *value = given
    if any(value) or len(around) > 2 * dims or not all(isinstance(n, int) and n >= 0 for n in around):
        return None
    whole = [*around, *[0] * (2 * dims - len(around))]  # from the last dimension on
    return whole[-2::-2], whole[::-2]
