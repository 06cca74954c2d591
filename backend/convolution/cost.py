"""Predicts or looks up the time of a convolution by Gossamer's kernel and by torch, and judges whether to replace it."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.convolution.plan_window import depthwise_cycles, kernel_cycles
from gossamer.backend.devices.calibrated import this_machine
from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import DENSE
from gossamer.backend.graph.masked_matrix import arrangement_of
from gossamer.backend.graph.nodes import arguments, hints, in_training
from gossamer.backend.measuring.convolution_times import torch_us
from gossamer.backend.regions.cost import matrix_of, predicted
from gossamer.backend.report.details import Contender, Details
from gossamer.runtime.elements import FLOATS

CONVOLVE = "convolve"
"""The name of the schedule of Gossamer's kernel."""

_DENSE_STORE, _DENSE_TAP = 8.0, 1.5  # cycles of torch's depthwise convolution for a vector of results, and for each of its taps


def gain_of(convolution: Convolution, density: float | None = None) -> float:
    """Returns how many times faster than dense Gossamer's kernel is, with a weight of this density (its own by default)."""
    return dense_us(convolution) / ours_us(convolution, density)


def ours_us(convolution: Convolution, density: float | None = None) -> float:
    """Returns the microseconds of Gossamer's kernel and of the reordering around it, with this density (by default its own)."""
    c, pixels = convolution, convolution.pixels
    matrix = replace(matrix_of(c), density=c.weight.density if density is None else density)
    kernel_us, us = kernel_us_of(c, density), 0.0
    if c.instead is not None and prod(c.instead.stride) > 1:  # its results are interleaved
        us += device_of(c.weight.device).transpose_us(c.m * pixels * c.weight.dtype.itemsize)
    if c.x.meta["val"].stride()[1] == 1 != c.x.meta["val"].shape[1]:  # channels last: images and results are reordered
        us += device_of(c.weight.device).transpose_us((c.channels + c.m) * pixels * c.weight.dtype.itemsize)
    if not c.depthwise and (not c.measured or density is not None):
        kernel_us += renewal_us(c, matrix.density)
    return kernel_us + us / torch.get_num_threads()


def kernel_us_of(convolution: Convolution, density: float | None = None) -> float:
    """Returns the microseconds of a call of the kernel, measured or predicted, with this density (by default its own)."""
    c = convolution
    if c.kernel_us is not None and density is None:
        return c.kernel_us
    matrix = replace(matrix_of(c), density=c.weight.density if density is None else density)
    cycles = depthwise_cycles(matrix, c.window, *c.results[1:]) if c.depthwise else kernel_cycles(matrix, c.window, c.results)
    us = c.images * cycles / this_machine().speeds[matrix.element].cycles_a_us("rowpairs", c.pixels)
    return us / torch.get_num_threads() + this_machine().call_us


def renewal_us(convolution: Convolution, density: float) -> float:
    """Returns the microseconds to pack new values in training; 0 in inference. A measured `kernel_us` includes them."""
    c = convolution
    share = density if arrangement_of(c.weight.evaluate) is not None else 1.0
    return device_of(c.weight.device).renewal_us(int(c.m * c.k * share)) if in_training(c.node.graph) else 0.0


def dense_us(convolution: Convolution) -> float:
    """Returns the microseconds of torch's convolution with channels innermost: measured, or predicted if it may not measure."""
    c = convolution
    if (measured := measured_us(c.dense_node)) is not None:
        return measured * c.share if c.dense_node is c.node else measured
    if not c.depthwise:
        return predicted(c, c.pixels, 1.0).dense_us * c.share
    matrix, tokens = matrix_of(c), c.pixels
    cycles = matrix.rows / matrix.lanes * tokens * (_DENSE_STORE + _DENSE_TAP * c.window.taps)
    return cycles / this_machine().speeds[matrix.element].cycles_a_us("rowpairs", tokens) / torch.get_num_threads()


def details_of(convolution: Convolution) -> Details:
    """Returns the contenders for the report: torch's convolution and Gossamer's kernel, with predicted and measured times."""
    c, dense = convolution, dense_us(convolution)
    timed, ours = measured_us(c.dense_node) is not None, ours_us(replace(c, kernel_us=None, measured=False))
    contenders = (
        Contender(DENSE, None if timed else dense, dense if timed else None),
        Contender(CONVOLVE, ours, None if c.kernel_us is None else ours_us(c)),
    )
    return Details(c.pixels, False, str(c.weight.dtype).removeprefix("torch."), contenders)


def measurable(node: fx.Node) -> tuple[Any, ...] | None:
    """Returns the arguments of `torch_us` for a convolution; None if it cannot be measured."""
    first, second, _, *how = arguments(node)
    x, w = first.meta["val"], second.meta["val"]
    sizes, kernel = hints(x.shape), hints(w.shape)
    if not x.is_cpu or x.dtype not in FLOATS or sizes is None or kernel is None or is_open(how):
        return None
    return [n or 1 for n in sizes], tuple(kernel), x.dtype, *how


def is_open(how: Any) -> bool:
    """Whether strides, paddings or groups are known only when the graph runs."""
    return any(map(is_open, how)) if isinstance(how, list | tuple) else isinstance(how, fx.Node)


def measured_us(node: fx.Node, *, planar: bool = False) -> float | None:
    """Returns the measured microseconds of torch's convolution; None if it is not measured.

    Images have channels innermost, or pixels if `planar`.
    """
    given = measurable(node)
    return None if given is None else torch_us(*given, planar=planar)


@dataclass(frozen=True)
class Judgement:
    """Whether to replace a convolution.

    able    whether Gossamer has a kernel for it
    reason  why it stays dense; None if it is replaced
    gain    how many times faster than dense it is
    """

    found: Convolution
    able: bool
    reason: str | None
    gain: float | None


def judged_by(found: Convolution, gain: float, min_gain: float) -> Judgement:
    """Judges a convolution that has a kernel, by its gain."""
    if gain >= min_gain:
        return Judgement(found, True, None, gain)
    what = "small" if gain_of(found, 0.01) < min_gain else "dense"
    return Judgement(found, True, f"too {what} for a gain of {min_gain:g}x", gain)
