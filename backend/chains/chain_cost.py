"""Whether a chain pays: its products together, with what lies between, against one by one."""

import math
from dataclasses import dataclass

from gossamer.backend.chains.find_chains import Chain, Stage, few_tokens
from gossamer.backend.devices.device import Device, device_of
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import lasting_tokens, matrix_of, predicted, usual_tokens
from gossamer.passes.chains.products import gain_in_chain, runs_in_chains
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.elements import WEIGHTS

_AROUND_US, _RESULT_US = 6.0, 6.0
"""Microseconds that a graph takes around the call of a region, and for each of its results. It makes views and allocates
memory, and Inductor cannot fuse what comes before the call with what follows it."""

_ATTENTION_US, _SWEEP_US = 10.0, 2.0
"""Microseconds of a call outside of a chain: of attention, or of the code that Inductor makes for a sweep over rows. Their
tensors also go through memory: four matrices of attention, two of a sweep."""

_CACHED_BYTES, _CACHED = 1 << 20, 0.4
"""A sweep over at most so many bytes finds them in the cache. Then it takes this share of the time that memory would take."""

_PRODUCT_US = 3.0
"""Microseconds that it takes to call a product of low rank outside of a chain; and its result goes through memory."""


def is_sequence(chain: Chain) -> bool:
    """Whether it has so few tokens that products for few tokens follow each other."""
    few = all(few_tokens(contraction) for contraction in chain.contractions)
    plain = chain.attention is None and not chain.by_position and not chain.low_rank
    return few and plain and all(stage.body is not None for stage in chain.stages)


def schedules_of(chain: Chain) -> list[str | None]:
    """The schedule of each product of a chain; None if it cannot run there."""
    if is_sequence(chain):
        return [predicted(contraction, contraction.tokens).schedule for contraction in chain.contractions]
    return [chain_schedule(contraction) for contraction in chain.contractions]


def chain_schedule(contraction: Contraction) -> str | None:
    """The schedule in which a chain runs a contraction tile by tile, the fastest there; None if it cannot."""
    if contraction.side != "right":
        return None
    matrix, tokens = matrix_of(contraction), lasting_tokens(contraction)
    able = [(name, us) for name, us in predicted(contraction, tokens).by_schedule if runs_in_chains(name, matrix)]
    gains = {name: gain_in_chain(name, matrix, tokens) for name, _ in able}
    return min(able, key=lambda each: each[1] / gains[each[0]])[0] if able else None


@dataclass(frozen=True)
class ChainCosts:
    """Microseconds of a chain.

    together  as one kernel
    apart     its products one by one, each as it is fastest, and what lies between
    dense     all of it densely
    between   the share of `dense` that lies between products and attention
    measured  whether `together` and `dense` were measured
    """

    together: float
    apart: float
    dense: float
    between: float
    measured: bool = False

    @property
    def gain(self) -> float:
        """How many times faster than dense it is."""
        return self.dense / self.together

    @property
    def known(self) -> bool:
        """Whether a chain can be as it is predicted to be at all."""
        return 0 < self.together < math.inf


def chain_pays(costs: ChainCosts, min_gain: float) -> bool:
    """Whether a chain is faster than its products one by one, and faster than dense by the factor `min_gain`."""
    return costs.together <= costs.apart and min_gain * costs.together <= costs.dense


def chain_costs(chain: Chain, min_gain: float) -> ChainCosts:
    """What a chain is predicted to cost."""
    device = device_of(chain.contractions[0].weight.device)
    tokens = usual_tokens(chain.contractions[0])
    few, together, apart, dense, between = is_sequence(chain), device.call_us + around_us(len(chain.results)), 0.0, 0.0, 0.0
    for stage in chain.stages:
        if stage.contraction is not None:
            found = predicted(stage.contraction, tokens)
            together += found.sparse_us - device.call_us if few else _chained_us(stage.contraction, chain)
            alone = found.sparse_us + around_us(1)
            # With a minimal gain of 0 all is to be sparse, and dense is no way to do it.
            apart += min(alone, found.dense_us) if min_gain > 0 else alone
            dense += found.dense_us
        else:
            us = _stage_us(stage, tokens, device)
            apart, dense = apart + us, dense + us
            between += us if stage.attention is None else 0.0
    for inner in chain.low_rank:
        k, n = inner.features
        dtype = inner.node.meta["val"].dtype
        matrix = Matrix(n, k, 1, WEIGHTS[dtype], device.bits, features=device.features)
        us, around = device.predict(matrix, tokens).dense_us, _PRODUCT_US + device.transpose_us(tokens * n * dtype.itemsize)
        together += us
        apart, dense = apart + us + around, dense + us + around
        between += us + around
    return ChainCosts(together, apart, dense, between)


def around_us(results: int) -> float:
    """Microseconds that a graph takes around the call of a region with so many results."""
    return _AROUND_US + _RESULT_US * results


def _stage_us(stage: Stage, tokens: int, device: Device) -> float:
    """Microseconds that attention or a sweep over rows takes outside of a chain."""
    size = tokens * stage.columns * stage.output.meta["val"].dtype.itemsize
    if stage.attention is not None:
        return _ATTENTION_US + device.transpose_us(4 * size)
    return _SWEEP_US + device.transpose_us(2 * size) * (_CACHED if 2 * size <= _CACHED_BYTES else 1)


def _chained_us(contraction: Contraction, chain: Chain) -> float:
    """Microseconds of a product in a chain, whose tiles have tokens of one sequence: what is left of a vector is computed in
    vain, and tiles of a single vector cost as much as if they came alone."""
    schedule, lanes = chain_schedule(contraction), matrix_of(contraction).lanes
    call = device_of(contraction.weight.device).call_us
    batch, length = chain.attention.sizes if chain.attention is not None else (1, usual_tokens(contraction))
    if not isinstance(batch, int) or not isinstance(length, int):
        batch, length = 1, usual_tokens(contraction)
    times, padded = (batch, length) if length <= lanes else (1, batch * -(-length // lanes) * lanes)
    found = dict(predicted(contraction, padded, measured=usual_tokens(contraction)).by_schedule)
    if schedule not in found:
        return math.inf
    return times * (found[schedule] - call) / gain_in_chain(schedule, matrix_of(contraction), padded)
