"""Whether a chain pays: its products together, with what lies between, against one by one."""

import math

from gossamer.backend.chains.find_chains import Chain
from gossamer.backend.devices.device import device_of
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import matrix_of, predicted, usual_tokens
from gossamer.passes.chain.products import gain_in_chain, runs_in_chains

_STAGE_US = 10.0
"""Microseconds that it takes to call attention or a sweep over rows outside of a chain; and its tensors go through memory."""


def chain_schedule(contraction: Contraction) -> str | None:
    """The schedule in which a chain runs a contraction; None if it cannot."""
    if contraction.side != "right":
        return None
    matrix, found = matrix_of(contraction), predicted(contraction, contraction.tokens)
    return next((name for name, _ in found.by_schedule if runs_in_chains(name, matrix)), None)


def chain_pays(chain: Chain) -> bool:
    """Whether a chain is faster than its products one by one, each on its best schedule, and what lies between."""
    device = device_of(chain.contractions[0].weight.device)
    tokens = usual_tokens(chain.contractions[0])
    together, apart = device.call_us, 0.0
    for stage in chain.stages:
        if stage.contraction is not None:
            together += _chained_us(stage.contraction, chain)
            apart += predicted(stage.contraction, tokens).sparse_us
        else:
            out = stage.output.meta["val"]
            apart += _STAGE_US + device.transpose_us(2 * tokens * stage.columns * out.dtype.itemsize)
    return together <= apart


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
