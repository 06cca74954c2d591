"""Measures chains whose predicted gain is in doubt: the kernel against torch's dense products and attention, one by one.

The dense time includes the predicted time of the work between products, because only Inductor could tell how it fuses that.
Inputs are random, weights are real. Times are kept by signature of the chain, densities and sizes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from gossamer.backend.chains.build_chain import signature_of
from gossamer.backend.chains.chain_cost import ChainCosts, around_us
from gossamer.backend.chains.dense_chain import attend
from gossamer.backend.chains.find_chains import Chain
from gossamer.backend.devices import pace
from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import DENSE, believable
from gossamer.backend.graph.nodes import hint
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.measuring.kept import kept
from gossamer.backend.measuring.measure import Call, dense_product, fastest, random
from gossamer.backend.regions.build_region import Built, content_hash
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import usual_tokens
from gossamer.backend.regions.matrix_functions import Extra

_CHAIN = "chain"
_ROUNDS = 4


def measured_costs(
    chain: Chain, predicted: ChainCosts, built: Built, leaves: Sequence[Sequence[torch.Tensor]], budget: Budget
) -> ChainCosts:
    """Returns the measured costs of a chain; `predicted` if it cannot be measured or the times are not believable.

    `leaves` are the values that each weight is computed from.
    """
    contractions = chain.contractions
    sizes, threads = _sizes(chain), torch.get_num_threads()
    if sizes is None or not all(device_of(c.weight.device).measures and not c.quantized for c in contractions):
        return predicted
    batch, length = sizes
    pattern = [c.weight.density for c in contractions]
    key = [content_hash(signature_of(chain), json.dumps(pattern)), batch, length, threads]

    @cache
    def times() -> tuple[Mapping[str, float], float | None]:
        operands = _operands(chain, leaves, batch, length)
        together: Any = built.region
        with torch.no_grad():
            calls: dict[str, Call] = {_CHAIN: partial(together, operands), DENSE: _densely(chain, leaves, batch, length)}
            before = pace.noted()
            return fastest(calls, threads, _ROUNDS), pace.since(before)

    def time_of(name: str) -> float:
        found, beside = times()
        if beside is not None:
            pace.note(beside)  # both times come from one measurement, but are kept separately
        return found[name]

    with budget.spend():
        together, dense = (kept(f"chain-{name}", key, partial(time_of, name)) for name in (_CHAIN, DENSE))
    together, dense = together + around_us(len(chain.results)), dense + predicted.between
    if predicted.known and not believable(dense / together, predicted.dense / predicted.together):
        budget.settled = False
        return predicted
    apart = predicted.apart * dense / predicted.dense
    return replace(predicted, together=together, apart=apart, dense=dense, measured=True)


def _sizes(chain: Chain) -> tuple[int, int] | None:
    """Returns the number of sequences and their length; None if unknown or zero. Without attention, there is one sequence."""
    if chain.attention is None:
        tokens = usual_tokens(chain.contractions[0])
        return (1, tokens) if tokens else None
    batch, length = (hint(n.meta["val"] if isinstance(n, fx.Node) else n) for n in chain.attention.sizes)
    return (batch, length) if batch and length else None


def _operands(chain: Chain, leaves: Sequence[Sequence[torch.Tensor]], batch: int, length: int) -> list[torch.Tensor]:
    first, *others = chain.inputs
    x = _input(first, chain, batch, length)
    if chain.attention is not None:
        x = x.view(*((length, batch) if first.node in chain.by_position else (batch, length)), -1)
    return [x, *(leaf for values in leaves for leaf in values), *(_input(other, chain, batch, length) for other in others)]


def _input(operand: Extra, chain: Chain, batch: int, length: int) -> torch.Tensor:
    """Returns a value for an operand of a stage: random numbers, or a mask that hides nothing."""
    value, tokens = operand.node.meta["val"], batch * length
    if operand.kind == "mask":
        rows = batch if chain.attention is not None and chain.attention.key_mask else batch * length
        return torch.zeros((rows, length), dtype=value.dtype)
    if operand.kind == "factor":
        return random(*value.shape, dtype=value.dtype)
    width = hint(value.shape[-1]) or 1 if value.dim() else 1
    # The graph has [.., size of a head] after a norm or rotation; the chain has a matrix of all heads.
    width = next((stage.columns for stage in chain.stages if stage.output is operand.node), width)
    shapes = {"scalar": (), "vector": (width,), "column": (tokens, 1), "matrix": (tokens, width), "position": (tokens, width)}
    return random(*shapes[operand.kind], dtype=value.dtype)


def _densely(chain: Chain, leaves: Sequence[Sequence[torch.Tensor]], batch: int, length: int) -> Call:
    """Returns a call that computes all products and attention in torch, one after the other."""
    weights = iter(leaves)
    calls = list[Call]()
    for stage in chain.stages:
        if stage.contraction is not None:
            calls.append(_product(stage.contraction, next(weights), batch * length))
        elif stage.attention is not None:
            operands = [_input(operand, chain, batch, length) for operand in stage.operands]
            calls.append(partial(attend, length, *operands, **stage.attention.numbers))

    def run_all() -> None:
        for call in calls:
            call()

    return run_all


def _product(contraction: Contraction, leaves: Sequence[torch.Tensor], tokens: int) -> Call:
    weight = run(contraction.weight.evaluate, leaves).detach().to(contraction.given)
    x = random(tokens, contraction.k, dtype=contraction.given)
    return dense_product(x, weight.t() if weight.shape[1] == contraction.k else weight)
