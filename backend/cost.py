"""Whether a sparse kernel pays, and which schedules to compile: the cost model asked about a contraction on this machine."""

import math
from dataclasses import replace
from functools import lru_cache

import torch

from gossamer.backend.contractions import Contraction
from gossamer.backend.machine import this_machine
from gossamer.backend.times import DENSE, tokens_class
from gossamer.passes.cost_model import UNKNOWN_TOKENS, Prediction, predict
from gossamer.passes.family import Matrix
from gossamer.runtime.target import host

_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}

TOKEN_CLASSES = (1, 2, 4, 8, 16, 32)
"""Numbers of tokens up to each of which one schedule is chosen, where the number is not known at compile time."""

_CHAIN_GAIN = 1.4
"""How much faster a layer is as part of a chain, about."""

FEW_TOKENS = 8
"""Tokens up to which layers run one by one: a tile of a chain has a whole vector of tokens."""

_ANOTHER = 1.15
"""How much faster a schedule for fewer tokens has to be to be compiled, too."""

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
        return [(math.inf, _predicted(contraction, contraction.tokens).schedule)]
    chosen: list[tuple[float, str]] = []
    for most in (math.inf, *reversed(TOKEN_CLASSES)):
        tokens = max(usual_tokens(contraction), 2 * TOKEN_CLASSES[-1]) if most == math.inf else int(most)
        found = _predicted(contraction, tokens)
        if not chosen or dict(found.by_schedule).get(chosen[0][1], math.inf) > _ANOTHER * found.sparse_us:
            chosen.insert(0, (most, found.schedule))
    return chosen


def suits_chain(contraction: Contraction) -> bool:
    """Whether the K-blocked schedule, in which chains run, is about as fast as the best one for this contraction."""
    found = _predicted(contraction, contraction.tokens)
    kblock = dict(found.by_schedule).get("kblock", math.inf)
    return contraction.side == "right" and usual_tokens(contraction) > FEW_TOKENS and kblock <= _CHAIN_GAIN * found.sparse_us


def usual_tokens(contraction: Contraction) -> int:
    """The number of tokens to expect."""
    return UNKNOWN_TOKENS if contraction.tokens is None else contraction.tokens


def matrix_of(contraction: Contraction) -> Matrix:
    """The weight of a contraction, as the families see it: its pattern is rounded to that of similar weights."""
    c, weight = contraction, contraction.weight
    by_rows = weight.transposed == (c.side == "right")  # stored as [M, K]
    pattern = (weight.pattern if by_rows else weight.pattern.transposed).rounded
    return Matrix(
        c.m, c.k, 1 if by_rows else 0, _NAMES[weight.dtype], host().vector_bits, pattern.density,
        pattern.block, pattern.fill, pattern.rows.nm, pattern.rows.skew, host().instructions,
    )  # fmt: skip


_predict = lru_cache(maxsize=1024)(predict)  # layers of one shape are asked about again and again


def _predicted(contraction: Contraction, tokens: int | None, density: float | None = None) -> Prediction:
    """The prediction for this machine; where the product was measured, what is wrong with its prediction is put right."""
    matrix, threads, machine = matrix_of(contraction), torch.get_num_threads(), this_machine()
    own = replace(matrix, density=contraction.weight.density)
    found = _predict(own if density is None else replace(matrix, density=density), tokens, threads, machine)
    times = contraction.times.get(tokens_class(UNKNOWN_TOKENS if tokens is None else tokens))
    if times is None:
        return found
    base = _predict(own, tokens, threads, machine)
    factors = {name: (times.us[name] + machine.call_us) / us for name, us in base.by_schedule if name in times.us}
    return found.scaled(times.us[DENSE] / base.dense_us, factors) if factors else found
