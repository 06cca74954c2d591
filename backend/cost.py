"""Whether a sparse kernel pays, and which schedules to compile: the cost model asked about a contraction on this machine."""

import math

import torch

from gossamer.backend.contractions import Contraction
from gossamer.passes.cost_model import Prediction, predict
from gossamer.passes.families import FAMILIES
from gossamer.passes.family import Matrix
from gossamer.runtime.target import host

_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}

_COPY_GBS = 5.0
"""Speed at which a matrix is transposed, in GB/s."""

_RENEWAL_US = 1.2e-3
"""Microseconds to evaluate, compare and gather one element of a weight that has changed."""


def predicted_gain(contraction: Contraction, density: float | None = None) -> float:
    """How many times faster than dense the contraction is with a weight of this density (its own by default).

    A weight on the left costs two transposes more: x before and y after it.
    """
    c = contraction
    found = _predicted(c, c.tokens, density)
    transposes = 0.0
    if c.side == "left" and c.tokens != 1:
        transposes = (c.m + c.k) * (c.tokens or 1) * c.weight.dtype.itemsize / (_COPY_GBS * 1e3)
    return found.dense_us / (found.sparse_us + transposes)


def renewing_pays(contraction: Contraction, min_gain: float) -> bool:
    """Whether sparse is faster even if the values of the weight have to be gathered before every call, as in training."""
    c = contraction
    found = _predicted(c, c.tokens)
    return min_gain == 0 or found.dense_us > found.sparse_us + _RENEWAL_US * c.m * c.k


def densest_that_pays(contraction: Contraction, min_gain: float) -> float:
    """The density above which dense is faster, to 1 %; 1 where `min_gain` is 0 and everything is to be sparse.

    At least the weight's own density, which was found to pay.
    """
    if min_gain == 0:
        return 1.0
    paying = [p / 100 for p in range(1, 101) if predicted_gain(contraction, p / 100) >= 1]
    return max([*paying[-1:], contraction.weight.density])


def schedules(contraction: Contraction, wanted: str) -> list[tuple[float, str]]:
    """The schedules to compile for a contraction, each with the most tokens it is for; the last takes any number.

    `wanted` is the option: "auto" leaves it to the number of tokens, of which a dynamic one may turn out few or many.
    """
    if wanted != "auto":
        return [(math.inf, wanted)]
    if not contraction.dynamic:
        return [(math.inf, _predicted(contraction, contraction.tokens).schedule)]
    chosen: list[tuple[float, str]] = []
    limits = sorted({family.most for family in FAMILIES.values()})
    for most in limits:
        schedule = _predicted(contraction, contraction.tokens if most == math.inf else int(most)).schedule
        if chosen and chosen[-1][1] == schedule:
            chosen.pop()
        chosen.append((most, schedule))
    return chosen


def _predicted(contraction: Contraction, tokens: int | None, density: float | None = None) -> Prediction:
    weight = contraction.weight
    matrix = Matrix(
        contraction.m,
        contraction.k,
        0 if weight.transposed == (contraction.side == "right") else 1,
        _NAMES[weight.dtype],
        host().vector_bits,
        weight.density if density is None else density,
    )
    return predict(matrix, tokens, torch.get_num_threads())
