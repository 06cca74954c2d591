"""Judges the convolutions of a graph together: which of them Gossamer computes, and whether that pays for the graph.

Inductor keeps channels innermost in all images, which oneDNN prefers. Sparse kernels keep pixels innermost ("planar"). If one
reads the result of the other, images are reordered. So a convolution that gains nothing by itself is replaced, too, if its
kernel takes less time than oneDNN and the reordering. The time of all convolutions is then compared with their dense time, and
those that stay dense count on both sides. So a graph with few sparse convolutions must gain much in these.

Networks with squeeze-and-excite need a higher gain, because neither time includes their gates. A gate takes two convolutions of
single pixels and a pass over its images. If the gain is close, a `Trial` of the whole graph decides.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import fx

from gossamer.backend.convolution.cost import Judgement, dense_us, is_open, measured_us, ours_us
from gossamer.backend.convolution.filter_gradients import is_multiplied
from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.trial import Trial
from gossamer.backend.graph.fusable import is_elementwise
from gossamer.backend.graph.nodes import arguments, hint, hints
from gossamer.backend.measuring.convolution_times import filter_gradient_us
from gossamer.backend.report.words import times
from gossamer.runtime.elements import FLOATS

aten = torch.ops.aten

_FEW_CHANNELS = 4  # oneDNN reads images with fewer channels, such as RGB, in either order
_GATES = 4  # with so many convolutions of single pixels, they are gates and not only the head of the network
_GATED = 1.8  # factor on the required gain with gates
_COPIES = 4  # a reordering by torch goes element by element, and takes as long as so many of Gossamer's


def together(graph: fx.Graph, judged: Sequence[Judgement], min_gain: float, trial: Trial | None) -> list[Judgement]:
    """Returns the judgements, now of all convolutions as parts of one graph. If the gain is close, the trial decides."""
    able = [each for each in judged if each.able]
    others = {node for node in graph.nodes if node.target is aten.convolution.default and node.users}
    others -= {each.found.node for each in able}
    gradients = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    gradients = [node for node in gradients if not is_multiplied(node)]
    staying = [_staying_us(node) for node in others] + [_staying_gradient_us(node) for node in gradients]
    dense, ours = (sum(times) for times in zip(*staying, strict=True)) if staying else (0.0, 0.0)
    taken = dict[fx.Node, float]()
    for each in able:
        found = each.found
        reordering, here = _reordering_us(found.node), ours_us(found)
        alone = min(dense_us(found), here) if found.depthwise else dense_us(found)
        planar = measured_us(found.node, planar=True) if found.instead is None else None
        apart = alone + reordering if planar is None else planar + _following_us(found.node)
        if any(
            user.target is aten.permute.default for user in found.node.users
        ):  # to channels innermost, which is free behind oneDNN only
            here += reordering
        dense, ours = dense + alone, ours + min(here, apart)
        if here <= apart:
            taken[found.node] = apart / here
    gated = sum(map(_of_single_pixels, {*others, *(each.found.node for each in able)})) >= _GATES
    factor, gain = _GATED if gated else 1.0, dense / max(ours, 1)
    wanted = min_gain * factor
    pays = gain > wanted
    against = f"too little for its graph, whose convolutions together would gain {times(gain)}x"
    if gated:
        against += f", of {times(wanted)}x for one with gates (squeeze-and-excite)"
    some = any(each.reason is None and not each.found.depthwise for each in able)
    if trial is not None and some and trial.decides(gain, factor):
        pays, against = trial.sparse, "its graph was timed, and is faster with dense convolutions"
    pays = pays and some
    return [_judged_again(each, None if pays else against, taken.get(each.found.node)) for each in judged]


def _judged_again(judgement: Judgement, against: str | None, gain: float | None) -> Judgement:
    """Returns the final judgement. `against` says why the graph loses. `gain` is over dense here; None if dense wins."""
    if not judgement.able:
        return judgement
    if against is not None:
        return replace(judgement, reason=judgement.reason or against)
    if gain is None:
        reason = "dense is faster, even with images reordered for the sparse convolutions beside it"
        return replace(judgement, reason=judgement.reason or reason)
    return replace(judgement, reason=None, gain=gain if judgement.gain is None else max(judgement.gain, gain))


def _of_single_pixels(node: fx.Node) -> bool:
    return all(hint(size) == 1 for size in node.meta["val"].shape[2:])


def _staying_us(node: fx.Node) -> tuple[float, float]:
    """Returns the microseconds of a dense convolution with channels innermost, and with pixels innermost.

    If these are unknown, it returns 0 and the microseconds to reorder images.
    """
    planar, innermost = measured_us(node, planar=True), measured_us(node)
    if planar is None or innermost is None:
        return 0.0, _reordering_us(node)
    return innermost, max(innermost, planar)


def _staying_gradient_us(node: fx.Node) -> tuple[float, float]:
    """Returns the same for the gradient of filters, whose images and incoming gradient have pixels innermost, too."""
    *operands, _, stride, padding, dilation, transposed, _, groups, wanted = arguments(node)
    g, *_ = values = [each.meta["val"] for each in operands]
    how, sizes = (stride, padding, dilation, groups), [hints(value.shape) for value in values]
    if transposed or not wanted[1] or not g.is_cpu or g.dtype not in FLOATS or None in sizes or is_open(how):
        return 0.0, 0.0
    given_g, given_x, kernel = ([n or 1 for n in each or ()] for each in sizes)
    planar = filter_gradient_us(given_g, given_x, kernel, g.dtype, *how, planar=True)
    innermost = filter_gradient_us(given_g, given_x, kernel, g.dtype, *how)
    return (0.0, 0.0) if planar is None or innermost is None else (innermost, max(innermost, planar))


def _following_us(node: fx.Node) -> float:
    """Returns the microseconds of elementwise work behind torch's planar convolution: a pass over its result."""
    y = node.meta["val"]
    if not any(map(is_elementwise, node.users)):
        return 0.0
    return device_of(y.device).transpose_us(prod(hint(n) or 1 for n in y.shape) * y.itemsize) / torch.get_num_threads()


def _reordering_us(node: fx.Node) -> float:
    """Returns the microseconds to reorder the images that a dense convolution reads and writes."""
    x, y = (value.meta["val"] for value in (arguments(node)[0], node))
    sizes = [[hint(n) or 1 for n in value.shape] for value in (x, y)]
    if not y.is_cpu:
        return 0.0
    read = 0 if sizes[0][1] < _FEW_CHANNELS else prod(sizes[0])
    return device_of(y.device).transpose_us(_COPIES * (read + prod(sizes[1])) * y.itemsize) / torch.get_num_threads()
