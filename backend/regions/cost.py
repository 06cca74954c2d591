"""Whether a sparse kernel pays, and which schedules to compile: the cost model asked about a contraction on this machine."""

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
"""Numbers of tokens up to each of which one schedule is chosen, where the number is not known at compile time."""


_AT_ONCE = 64
"""Tokens that the schedules for many tokens take together."""

_ANOTHER = 1.15
"""How much faster a schedule for fewer tokens has to be to be compiled, too."""

_LEAST_US = 0.1
"""Microseconds that a product takes at least."""


def predicted_gain(contraction: Contraction, density: float | None = None) -> float:
    """How many times faster than dense the contraction is with a weight of this density (its own by default).

    A weight on the left costs two transposes more: x before and y after it.
    """
    found = predicted(contraction, contraction.tokens, density)
    return found.dense_us / (found.sparse_us + transposes_us(contraction))


def gain_without_call(contraction: Contraction) -> float:
    """How many times faster than dense the contraction is where it shares its call with others, as in a chain."""
    found, call_us = predicted(contraction, contraction.tokens), device_of(contraction.weight.device).call_us
    return found.dense_us / max(found.sparse_us - call_us + transposes_us(contraction), _LEAST_US)


def transposes_us(contraction: Contraction) -> float:
    """Microseconds in which x and y are transposed around a kernel."""
    c = contraction
    if c.side == "right" or c.tokens == 1:
        return 0.0
    return device_of(c.weight.device).transpose_us((c.m + c.k) * (c.tokens or 1) * c.weight.dtype.itemsize)


def permuting_pays(contraction: Contraction, reordered: Contraction) -> bool:
    """Whether sparse is faster with the weight reordered, although x and y have to be reordered, too."""
    c = contraction
    copies = device_of(c.weight.device).transpose_us((c.m + c.k) * usual_tokens(c) * c.given.itemsize)
    return predicted(c, c.tokens).sparse_us > predicted(reordered, c.tokens).sparse_us + copies


def renewing_pays(contraction: Contraction, min_gain: float, share: float = 1.0) -> bool:
    """Whether sparse is faster even if a share of the weight's elements is gathered before every call, as in training."""
    c = contraction
    found, renewal = predicted(c, c.tokens), device_of(c.weight.device).renewal_us(int(c.m * c.k * share))
    return min_gain == 0 or found.dense_us > found.sparse_us + renewal


def densest_that_pays(contraction: Contraction, min_gain: float) -> float:
    """The density above which dense is faster, to 1 %; 1 where `min_gain` is 0 and everything is to be sparse.

    At least the weight's own density, which was found to pay.
    """
    if min_gain == 0:
        return 1.0
    pays, loses = 0, 101
    while loses - pays > 1:
        percent = (pays + loses) // 2
        pays, loses = (percent, loses) if predicted_gain(contraction, percent / 100) >= 1 else (pays, percent)
    return max(pays / 100, contraction.weight.density)


def schedules(contraction: Contraction, wanted: str) -> list[tuple[float, str]]:
    """The schedules to compile for a contraction, each with the most tokens it is for; the last takes any number.

    `wanted` is the option: "auto" leaves it to the number of tokens, of which a dynamic one may turn out few or many.
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
    """The number of tokens to expect."""
    return UNKNOWN_TOKENS if contraction.tokens is None else contraction.tokens


def lasting_tokens(contraction: Contraction) -> int:
    """The number of tokens to choose a schedule for, which others may follow: where it is open and there are many, a multiple
    of what is taken at once, so that a weight has the same schedule, and one packed copy, in the graphs of many lengths."""
    tokens = usual_tokens(contraction)
    return -(-tokens // _AT_ONCE) * _AT_ONCE if contraction.dynamic and tokens > TOKEN_CLASSES[-1] else tokens


def matrix_of(contraction: Contraction) -> Matrix:
    """The weight of a contraction, as the families see it: its pattern is rounded to that of similar weights."""
    c, weight = contraction, contraction.weight
    by_rows = weight.transposed == (c.side == "right")  # stored as [M, K]
    made = matrix_with(weight.pattern if by_rows else weight.pattern.transposed, c.m, c.k, weight.dtype, weight.device)
    given = WEIGHTS[c.given] if c.given != weight.dtype else None
    return replace(made, reduction=1 if by_rows else 0, given=given, groups=weight.groups if by_rows else None)


def matrix_with(pattern: Pattern, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Matrix:
    """A weight [rows, columns] with such a pattern, as the families see it."""
    found, place = pattern.rounded, device_of(device)
    return Matrix(
        rows, columns, 1, WEIGHTS[dtype], place.bits, found.density, block=found.block, fill=found.fill, nm=found.rows.nm,
        skew=found.rows.skew, features=place.features, vnm=found.rows.vnm, l1d=first_level_bytes(),
    )  # fmt: skip


def predicted(
    contraction: Contraction, tokens: int | None, density: float | None = None, measured: int | None = None
) -> Prediction:
    """The prediction for its device; where the product was measured, what is wrong with its prediction is put right.

    `measured` is the number of tokens whose measurement counts, where that is another.
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
    """A prediction as wrong as `base`, that of a product whose schedules took these microseconds, put right."""
    factors = {name: (us[name] + call_us) / predicted for name, predicted in base.by_schedule if name in us}
    return found.scaled(us[DENSE] / base.dense_us, factors) if factors else found
