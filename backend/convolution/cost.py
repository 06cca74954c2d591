"""What a convolution takes by our kernel and by torch, with channels innermost or pixels, and what becomes of it then."""

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
from gossamer.backend.graph.nodes import hint, in_training
from gossamer.backend.measuring.convolution_times import torch_us
from gossamer.backend.regions.cost import matrix_of, predicted
from gossamer.backend.report.details import Contender, Details
from gossamer.runtime.elements import FLOATS

CONVOLVE = "convolve"
"""The schedule of our kernel."""

_DENSE_STORE, _DENSE_TAP = 8.0, 1.5  # cycles of a vector of results of torch's depthwise convolution, and for each tap


def gain_of(convolution: Convolution, density: float | None = None) -> float:
    """How many times as fast as dense it is predicted to be, with a weight of this density (its own by default)."""
    return dense_us(convolution) / ours_us(convolution, density)


def ours_us(convolution: Convolution, density: float | None = None) -> float:
    """Microseconds that our kernel takes, with a weight of this density (its own by default)."""
    c, pixels = convolution, convolution.pixels
    matrix = replace(matrix_of(c), density=c.weight.density if density is None else density)
    kernel_us, us = kernel_us_of(c, density), 0.0
    if c.instead is not None and prod(c.instead.stride) > 1:  # what comes out is interleaved
        us += device_of(c.weight.device).transpose_us(c.m * pixels * c.weight.dtype.itemsize)
    if c.x.meta["val"].stride()[1] == 1 != c.x.meta["val"].shape[1]:  # channels last: it is copied, and what reads the result
        us += device_of(c.weight.device).transpose_us((c.channels + c.m) * pixels * c.weight.dtype.itemsize)
    if not c.depthwise and (not c.measured or density is not None):
        kernel_us += renewal_us(c, matrix.density)
    return kernel_us + us / torch.get_num_threads()


def kernel_us_of(convolution: Convolution, density: float | None = None) -> float:
    """Microseconds that a call of its kernel takes, measured or predicted, for a weight of this density (else its own)."""
    c = convolution
    if c.kernel_us is not None and density is None:
        return c.kernel_us
    matrix = replace(matrix_of(c), density=c.weight.density if density is None else density)
    cycles = depthwise_cycles(matrix, c.window, *c.results[1:]) if c.depthwise else kernel_cycles(matrix, c.window, c.results)
    us = c.images * cycles / this_machine().speeds[matrix.element].cycles_a_us("rowpairs", c.pixels)
    return us / torch.get_num_threads() + this_machine().call_us


def renewal_us(convolution: Convolution, density: float) -> float:
    """Microseconds to take over a weight's values, which in training are new at every step; `kernel_us` has measured ones."""
    c = convolution
    share = density if arrangement_of(c.weight.evaluate) is not None else 1.0
    return device_of(c.weight.device).renewal_us(int(c.m * c.k * share)) if in_training(c.node.graph) else 0.0


def dense_us(convolution: Convolution) -> float:
    """Microseconds that it takes dense, channels innermost: measured, or predicted where that may not be."""
    c = convolution
    if (measured := measured_us(c.dense_node)) is not None:
        return measured * c.share if c.dense_node is c.node else measured
    if not c.depthwise:
        return predicted(c, c.pixels, 1.0).dense_us * c.share
    matrix, tokens = matrix_of(c), c.pixels
    cycles = matrix.rows / matrix.lanes * tokens * (_DENSE_STORE + _DENSE_TAP * c.window.taps)
    return cycles / this_machine().speeds[matrix.element].cycles_a_us("rowpairs", tokens) / torch.get_num_threads()


def details_of(convolution: Convolution) -> Details:
    """What competed for a convolution: torch's own, and our kernel, measured where they were."""
    c, dense = convolution, dense_us(convolution)
    timed, ours = measured_us(c.dense_node) is not None, ours_us(replace(c, kernel_us=None, measured=False))
    contenders = (
        Contender(DENSE, None if timed else dense, dense if timed else None),
        Contender(CONVOLVE, ours, None if c.kernel_us is None else ours_us(c)),
    )
    return Details(c.pixels, False, str(c.weight.dtype).removeprefix("torch."), contenders)


def measurable(node: fx.Node) -> tuple[Any, ...] | None:
    """What torch_us takes for a convolution: shapes of images and kernels, their type, and how. None if it is not measured."""
    x, w = (each.meta["val"] for each in node.all_input_nodes[:2])
    if not x.is_cpu or x.dtype not in FLOATS:
        return None
    sizes = [hint(n) for n in x.shape]
    if None in sizes:
        return None
    return [n or 1 for n in sizes], tuple(map(int, w.shape)), x.dtype, *node.args[3:]


def measured_us(node: fx.Node, *, planar: bool = False) -> float | None:
    """What a convolution takes dense with channels innermost, or pixels, in what it reads and writes; None where that is not
    measured."""
    given = measurable(node)
    return None if given is None else torch_us(*given, planar=planar)


@dataclass(frozen=True)
class Judgement:
    """What becomes of a convolution.

    able    whether a kernel of ours can compute it
    reason  why it stays dense, None if it does not
    gain    predicted for it alone
    """

    found: Convolution
    able: bool
    reason: str | None
    gain: float | None


def judged_by(found: Convolution, gain: float, min_gain: float) -> Judgement:
    """What becomes of one that a kernel can compute, by what it gains."""
    if gain >= min_gain:
        return Judgement(found, True, None, gain)
    what = "small" if gain_of(found, 0.01) < min_gain else "dense"
    return Judgement(found, True, f"too {what} for a gain of {min_gain:g}x", gain)
