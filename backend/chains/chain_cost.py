"""Predicts the time of a chain: as one kernel, as separate sparse products, and dense. weights/plan.py decides with it."""

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
"""Microseconds that the graph spends around the call of a region, and for each result of it. The graph makes views and
allocates memory, and Inductor cannot fuse the work before the call with the work after it."""

_ATTENTION_US, _SWEEP_US = 10.0, 2.0
"""Microseconds of a call outside a chain: of attention, or of Inductor's code for a sweep over rows. To this comes the time of
memory: attention reads and writes four matrices, a sweep two."""

_CACHED_BYTES, _CACHED = 1 << 20, 0.4
"""A sweep over at most so many bytes finds them in the cache, and takes this share of the time of memory."""

_PRODUCT_US = 3.0
"""Microseconds to call a product of low rank outside a chain. To this comes the time to write its result to memory."""


def is_sequence(chain: Chain) -> bool:
    """Whether a chain runs as a sequence: one product after the other, each by a schedule for few tokens.

    Such a chain has no attention, no operations on single heads, no low ranks and no other order of tokens.
    """
    few = all(few_tokens(contraction) for contraction in chain.contractions)
    plain = chain.attention is None and not chain.by_position and not chain.low_rank
    return few and plain and all(stage.body is not None for stage in chain.stages)


def schedules_of(chain: Chain) -> list[str | None]:
    """Returns the schedule of each product of a chain; None for a product that cannot run there."""
    if is_sequence(chain):
        return [predicted(contraction, contraction.tokens).schedule for contraction in chain.contractions]
    return [chain_schedule(contraction) for contraction in chain.contractions]


def chain_schedule(contraction: Contraction) -> str | None:
    """Returns the fastest schedule that computes a contraction tile by tile in a chain; None if there is none."""
    if contraction.side != "right":
        return None
    matrix, tokens = matrix_of(contraction), lasting_tokens(contraction)
    able = [(name, us) for name, us in predicted(contraction, tokens).by_schedule if runs_in_chains(name, matrix)]
    gains = {name: gain_in_chain(name, matrix, tokens) for name, _ in able}
    return min(able, key=lambda each: each[1] / gains[each[0]])[0] if able else None


@dataclass(frozen=True)
class ChainCosts:
    """Microseconds of a chain.

    together  the chain as one kernel
    apart     its products one by one, each sparse or dense, whichever is faster, and the work between them
    dense     all of it dense
    between   the part of `dense` that is neither sparse products nor attention
    measured  whether `together` and `dense` were measured
    """

    together: float
    apart: float
    dense: float
    between: float
    measured: bool = False

    @property
    def gain(self) -> float:
        """How many times faster than dense the chain is."""
        return self.dense / self.together

    @property
    def known(self) -> bool:
        """Whether the time of the kernel could be predicted."""
        return 0 < self.together < math.inf


def chain_pays(costs: ChainCosts, min_gain: float) -> bool:
    """Whether a chain is faster than its products one by one, and faster than dense by the factor `min_gain`."""
    return costs.together <= costs.apart and min_gain * costs.together <= costs.dense


def chain_costs(chain: Chain, min_gain: float) -> ChainCosts:
    """Predicts the costs of a chain."""
    device = device_of(chain.contractions[0].weight.device)
    tokens = usual_tokens(chain.contractions[0])
    few, together, apart, dense, between = is_sequence(chain), device.call_us + around_us(len(chain.results)), 0.0, 0.0, 0.0
    for stage in chain.stages:
        if stage.contraction is not None:
            found = predicted(stage.contraction, tokens)
            together += found.sparse_us - device.call_us if few else _chained_us(stage.contraction, chain)
            alone = found.sparse_us + around_us(1)
            # A minimal gain of 0 means that everything has to be sparse.
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
    """Returns the microseconds that the graph spends around the call of a region with so many results."""
    return _AROUND_US + _RESULT_US * results


def _stage_us(stage: Stage, tokens: int, device: Device) -> float:
    """Returns the microseconds of attention, or of a sweep over rows, outside a chain."""
    size = tokens * stage.columns * stage.output.meta["val"].dtype.itemsize
    if stage.attention is not None:
        return _ATTENTION_US + device.transpose_us(4 * size)
    return _SWEEP_US + device.transpose_us(2 * size) * (_CACHED if 2 * size <= _CACHED_BYTES else 1)


def _chained_us(contraction: Contraction, chain: Chain) -> float:
    """Returns the microseconds of a product in a chain; infinity if it cannot run there.

    A tile has tokens of one sequence only, so that the length of sequences is rounded up to whole vectors. If a sequence has at
    most one vector of tokens, each sequence costs as much as a product of its own.
    """
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
