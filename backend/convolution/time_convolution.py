"""Measures convolutions whose predicted gain is in doubt: Gossamer's kernel and torch's convolution, side by side.

Each is measured without its epilogue, for all of its images. In training, its weight is written to before each call, as
optimizers do, so that the kernel packs the values anew. Equal convolutions share a measurement, which is kept for this machine.
If the time is up, the other predictions are corrected by the mean error of those that were measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import fx

from gossamer.backend.convolution.build import as_images, compiled, on_images
from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.convolution.cost import (
    CONVOLVE,
    Judgement,
    dense_us,
    gain_of,
    judged_by,
    kernel_us_of,
    measurable,
    renewal_us,
)
from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.measured_times import believable
from gossamer.backend.graph.nodes import hint, in_training
from gossamer.backend.measuring.convolution_times import torch_call, torch_us
from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import fastest, random
from gossamer.backend.regions.build_region import content_hash
from gossamer.backend.regions.compiled_kernel import format_of
from gossamer.backend.regions.cost import matrix_of
from gossamer.backend.regions.grow_region import Region
from gossamer.backend.regions.matrix_functions import ProductBody
from gossamer.backend.run.compiled_region import CompiledRegion, Weight
from gossamer.backend.run.packed_weights import Packings
from gossamer.dialects.errors import CompileError, FormatError

_OURS, _TORCHS = "ours", "torch"
_ROUNDS = 5
_SETTLING = 8  # calls after which a weight that changes at every call is packed as in later calls

Values = Mapping[fx.Node, torch.Tensor]


def timed(judged: Sequence[Judgement], values: Values, budget: Budget, min_gain: float) -> list[Judgement]:
    """Returns the judgements, with measured times if predictions are in doubt. `values` are those of the static leaves."""
    doubted = [n for n, each in enumerate(judged) if _is_doubted(each, budget)]
    heaviest = sorted(doubted, key=lambda n: -dense_us(judged[n].found))
    found, logs, left = dict[int, Convolution](), list[float](), list[int]()
    for n in heaviest:
        convolution = judged[n].found
        us = _kernel_us(convolution, values, budget)
        if us is None:
            left.append(n)
        else:
            found[n] = replace(convolution, kernel_us=us, measured=True)
            logs.append(math.log(us / _predicted_us(convolution)))
    wrong = math.exp(sum(logs) / len(logs)) if logs else 1.0
    found |= {n: replace(judged[n].found, kernel_us=wrong * kernel_us_of(judged[n].found)) for n in left if logs}
    return [judged_by(found[n], gain_of(found[n]), min_gain) if n in found else each for n, each in enumerate(judged)]


def _is_doubted(judgement: Judgement, budget: Budget) -> bool:
    c = judgement.found
    if not judgement.able or c.depthwise or judgement.gain is None or measurable(c.dense_node) is None:
        return False
    return budget.everything or budget.doubts(judgement.gain, dense_us(c), c.density)


def _kernel_us(convolution: Convolution, values: Values, budget: Budget) -> float | None:
    """Returns the microseconds of a kernel: torch's time times the measured ratio. None without time or kernel."""
    c, threads = convolution, torch.get_num_threads()
    given = measurable(c.dense_node)
    before = torch_us(*given) if given is not None else None
    sizes = [hint(size) or 1 for size in c.source.meta["val"].shape]
    trained = in_training(c.node.graph)
    key = [content_hash(matrix_of(c), c.window, c.x.meta["val"].dtype), sizes, threads, *(["trained"] if trained else [])]

    def measure() -> float:
        region = _region(c, values)
        x, leaves = random(*sizes, dtype=c.x.meta["val"].dtype), {leaf: values[leaf] for leaf in c.weight.leaves}
        if trained:
            leaves[c.weight.main] = leaves[c.weight.main].detach().clone()

        def ours() -> object:
            if trained:
                leaves[c.weight.main].as_strided((1,), (1,)).mul_(1)
            return region([x, *leaves.values()])

        calls = {_OURS: ours, _TORCHS: torch_call(*given)}  # type: ignore[misc]
        with torch.no_grad():
            for _ in range(_SETTLING if trained else 0):
                ours()
            us = fastest(calls, threads, _ROUNDS)
        return us[_OURS] / us[_TORCHS]

    if before is None or not budget.allows():
        return None
    predicted = _predicted_us(c)

    def can_be(share: float) -> bool:
        return share > 0 and believable(1 / share, before / predicted)

    try:
        with budget.spend():
            share = kept("sparse-convolution", key, measure, median, can_be)
    except (CompileError, FormatError):
        return None  # the region fails to compile, too, and reports why
    if can_be(share):
        return before * share
    budget.settled = False
    return None


def _predicted_us(convolution: Convolution) -> float:
    return kernel_us_of(convolution) + renewal_us(convolution, convolution.weight.density)


def _region(convolution: Convolution, values: Values) -> CompiledRegion:
    """Builds the convolution without an epilogue."""
    c, weight = convolution, convolution.weight
    body = ProductBody(c).finish(c.node)
    region = Region(c, body, (), (c.node,), c.node)
    kernel = compiled(str(c.node), c, region, CONVOLVE, None)
    packings = Packings.of(weight.key, weight.evaluate, format_of(kernel))
    own = Weight(packings, slice(1, 1 + len(weight.leaves)), 1.0, renew=True, verify=False)
    return as_images(c, region, kernel, (own,), on_images(body, c.window, c.x.meta["val"].dim()))
