"""Asks the cost model about a contraction on this machine: whether sparse is faster, and which schedules to compile."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import DENSE, tokens_class
from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.backend.regions.contractions import Contraction
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import UNKNOWN_TOKENS, Prediction
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.elements import WEIGHTS

TOKEN_CLASSES = (1, 2, 4, 8, 16, 32)
"""Upper bounds of tokens. If the number of tokens is not known at compile time, each class may have another schedule."""


_AT_ONCE = 64
"""The number of tokens that schedules for many tokens compute together."""

_ANOTHER = 1.15
"""Another schedule is compiled for fewer tokens only if it is so many times faster there."""

_LEAST_US = 0.1
"""The smallest time of a product, in microseconds."""


def predicted_gain(contraction: Contraction, density: float | None = None) -> float:
    """Returns the predicted speed-up over dense with a weight of this density (its own by default).

    A weight on the left needs two transposes: of x before the kernel, and of y after it.
    """
    found = predicted(contraction, contraction.tokens, density)
    return found.dense_us / (found.sparse_us + transposes_us(contraction))


def gain_without_call(contraction: Contraction) -> float:
    """Returns the predicted speed-up over dense without the cost of the call, which the products of a chain share."""
    found, call_us = predicted(contraction, contraction.tokens), device_of(contraction.weight.device).call_us
    return found.dense_us / max(found.sparse_us - call_us + transposes_us(contraction), _LEAST_US)


def transposes_us(contraction: Contraction) -> float:
    """Returns the microseconds that transposes of x and y around a kernel take."""
    c = contraction
    if c.side == "right" or c.tokens == 1:
        return 0.0
    return device_of(c.weight.device).transpose_us((c.m + c.k) * (c.tokens or 1) * c.weight.dtype.itemsize)


def permuting_pays(contraction: Contraction, reordered: Contraction) -> bool:
    """Whether a reordered weight is faster, including the time to reorder x and y."""
    c = contraction
    copies = device_of(c.weight.device).transpose_us((c.m + c.k) * usual_tokens(c) * c.given.itemsize)
    return predicted(c, c.tokens).sparse_us > predicted(reordered, c.tokens).sparse_us + copies


def renewing_pays(contraction: Contraction, min_gain: float, share: float = 1.0) -> bool:
    """Whether sparse is faster even if a share of the weight's elements is gathered before every call, as in training.

    True if `min_gain` is 0."""
    c = contraction
    found, renewal = predicted(c, c.tokens), device_of(c.weight.device).renewal_us(int(c.m * c.k * share))
    return min_gain == 0 or found.dense_us > found.sparse_us + renewal


def densest_that_pays(contraction: Contraction, min_gain: float) -> float:
    """Returns the density above which dense is faster, to 1 %. Returns 1 if `min_gain` is 0, because all layers become sparse.

    The result is at least the weight's own density, for which sparse was chosen.
    """
    if min_gain == 0:
        return 1.0
    pays, loses = 0, 101
    while loses - pays > 1:
        percent = (pays + loses) // 2
        pays, loses = (percent, loses) if predicted_gain(contraction, percent / 100) >= 1 else (pays, percent)
    return max(pays / 100, contraction.weight.density)


def schedules(contraction: Contraction, wanted: str) -> list[tuple[float, str]]:
    """Returns the schedules to compile, each with its largest number of tokens. The last one takes any number.

    wanted  the option `schedule`. "auto" chooses by the number of tokens; if that is dynamic, there may be several schedules
    """
    if wanted != "auto":
        return [(math.inf, wanted)]
    if not contraction.dynamic:
        return [(math.inf, predicted(contraction, contraction.tokens).schedule)]
    chosen: list[tuple[float, str]] = []
    for most in (math.inf, *reversed(TOKEN_CLASSES)):
        tokens = max(lasting_tokens(contraction), _AT_ONCE) if most == math.inf else int(most)
        found = predicted(contraction, tokens)
        if not chosen or dict(found.by_schedule).get(chosen[0][1], math.inf) > _ANOTHER * found.sparse_us:
            chosen.insert(0, (most, found.schedule))
    return chosen


def usual_tokens(contraction: Contraction) -> int:
    """Returns the expected number of tokens."""
    return UNKNOWN_TOKENS if contraction.tokens is None else contraction.tokens


def lasting_tokens(contraction: Contraction) -> int:
    """Returns the number of tokens to choose a schedule for.

    For many tokens of a dynamic number, rounds up to a multiple of `_AT_ONCE`. So graphs for many lengths choose the same
    schedule for a weight, and share one packed copy."""
    tokens = usual_tokens(contraction)
    return -(-tokens // _AT_ONCE) * _AT_ONCE if contraction.dynamic and tokens > TOKEN_CLASSES[-1] else tokens


def matrix_of(contraction: Contraction) -> Matrix:
    """Returns the weight of a contraction as the schedules' families see it. Its pattern is rounded, as for similar weights."""
    c, weight = contraction, contraction.weight
    by_rows = weight.transposed == (c.side == "right")  # stored as [M, K]
    made = matrix_with(weight.pattern if by_rows else weight.pattern.transposed, c.m, c.k, weight.dtype, weight.device)
    given = WEIGHTS[c.given] if c.given != weight.dtype else None
    return replace(made, reduction=1 if by_rows else 0, given=given, groups=weight.groups if by_rows else None)


def matrix_with(pattern: Pattern, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
    """Returns a weight [rows, columns] with this pattern, as the families see it."""
    found, place = pattern.rounded, device_of(device)
    return Matrix(
        rows, columns, 1, WEIGHTS[dtype], place.bits, found.density, block=found.block, fill=found.fill, nm=found.rows.nm,
        skew=found.rows.skew, features=place.features, vnm=found.rows.vnm, l1d=first_level_bytes(),
    )  # fmt: skip


def predicted(
    contraction: Contraction, tokens: int | None, density: float | None = None, measured: int | None = None
) -> Prediction:
    """Returns the prediction for a contraction's device. If the product was measured, the prediction is corrected.

    tokens    the number of tokens; None if it is not known
    density   another density than the weight's own
    measured  another number of tokens, whose measurement corrects the prediction
    """
    matrix, device = matrix_of(contraction), device_of(contraction.weight.device)
    own = replace(matrix, density=contraction.weight.density)
    found = device.predict(own if density is None else replace(matrix, density=density), tokens)
    known = tokens if measured is None else measured
    times = contraction.times.get(tokens_class(UNKNOWN_TOKENS if known is None else known))
    if times is None:
        return found
    return corrected(found, device.predict(own, known), times.us, device.call_us)


def corrected(found: Prediction, base: Prediction, us: Mapping[str, float], call_us: float) -> Prediction:
    """Corrects the prediction `found` by measurements.

    base  the prediction for the product that was measured; `found` is taken to be wrong by the same factors
    us    the measured microseconds of its schedules
    """
    factors = {name: (us[name] + call_us) / predicted for name, predicted in base.by_schedule if name in us}
    return found.scaled(us[DENSE] / base.dense_us, factors) if factors else found
