"""mode="max-autotune": each product with a sparse weight is measured, as every promising schedule and as torch does it.

The shortlist is what the cost model predicts to be within twice the fastest, and the fastest that runs in chains. Times go into
the tuning database; a product that it knows, or knows a similar one of, is not measured again. The measured times then stand in
for the prediction in everything that is decided about the product: dense or sparse, in a chain or not, and which schedule for
how many tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from gossamer.backend.devices import calibrated
from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import DENSE, Times, tokens_class
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.measuring.correct import correct
from gossamer.backend.measuring.measure import Product, fastest
from gossamer.backend.measuring.progress import progress
from gossamer.backend.measuring.tuning_db import Key, TuningDatabase
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import TOKEN_CLASSES, matrix_of, predicted_gain, usual_tokens
from gossamer.backend.regions.decide import refusal
from gossamer.backend.report.options import Options
from gossamer.passes.chain.products import runs_in_chains
from gossamer.passes.schedules.cost_model import predict

_SHORTLIST = 2.0  # times the fastest prediction up to which a schedule is measured
_HOPELESS = 0.5  # share of the wanted gain below which a prediction is believed


def tuned(contractions: Sequence[Contraction], values: Mapping[fx.Node, torch.Tensor], options: Options) -> list[Contraction]:
    """The contractions with what they take, measured now or before.

    `values` holds the real value of every leaf of a weight. Contractions that no kernel can take, or that are predicted to
    lose by far, stay as they are. Calibrates the machine first where that was not done.
    """
    if options.schedule == "reference":
        return list(contractions)
    _calibrate(contractions)
    database = TuningDatabase()
    wanted = [_keys(c) if _promising(c, options) else {} for c in contractions]
    known: dict[Key, Times] = {}
    missing: dict[Key, tuple[Contraction, int]] = {}
    for contraction, keys in zip(contractions, wanted, strict=True):
        for key, tokens in keys.items():
            if times := _remembered(key, options, database):
                known[key] = times
            else:
                missing.setdefault(key, (contraction, tokens))
    if missing:
        known |= _measured(missing, values, options, database)
    return [
        dataclasses.replace(c, times={key.tokens: known[key] for key in keys if key in known})
        for c, keys in zip(contractions, wanted, strict=True)
    ]


def _measured(
    missing: Mapping[Key, tuple[Contraction, int]],
    values: Mapping[fx.Node, torch.Tensor],
    options: Options,
    database: TuningDatabase,
) -> dict[Key, Times]:
    known: dict[Key, Times] = {}
    measured: list[tuple[Key, int, Times]] = []
    product, owner = None, None
    with progress("gossamer measures", len(missing)) as bar:
        for key, (contraction, tokens) in missing.items():
            m = key.matrix
            bar.advance(f"{m.rows}x{m.columns} {m.density:.0%}, {tokens} tokens")
            if times := _remembered(key, options, database):  # one before was similar
                known[key] = times
                continue
            if product is None or contraction is not owner:
                weight = run(contraction.weight.evaluate, [values[leaf] for leaf in contraction.weight.leaves])
                product, owner = Product(weight.detach(), m), contraction
            calls = product.calls(tokens, _shortlist(key, options))
            if len(calls) > 1:
                known[key] = Times(fastest(calls, key.threads))
                measured.append((key, tokens, known[key]))
                if options.schedule == "auto":
                    database.add(key, known[key])
    correct(measured)
    return known


def _remembered(key: Key, options: Options, database: TuningDatabase) -> Times | None:
    """The times of a key, or of a similar one, if the database has them."""
    times = database.find(key) or database.similar(key, _predicted)
    return times if times and (options.schedule == "auto" or options.schedule in times.us) else None


def _keys(contraction: Contraction) -> dict[Key, int]:
    """What is to be known about a contraction, each with the number of tokens to measure it with."""
    matrix, threads = matrix_of(contraction), torch.get_num_threads()
    usual = usual_tokens(contraction)
    any_number = [*TOKEN_CLASSES, max(usual, 2 * TOKEN_CLASSES[-1])] if contraction.dynamic else []
    counts = {tokens_class(t): t for t in [*any_number, usual]}
    return {Key(matrix, tokens, threads): count for tokens, count in counts.items()}


def _promising(contraction: Contraction, options: Options) -> bool:
    if not _measurable(contraction):
        return False
    return options.min_gain == 0 or predicted_gain(contraction) >= _HOPELESS * options.min_gain


def _measurable(contraction: Contraction) -> bool:
    """Whether its device can compute it and measures; elsewhere predictions stand."""
    return refusal(contraction) is None and not contraction.quantized and device_of(contraction.weight.device).measures


def _shortlist(key: Key, options: Options) -> list[str]:
    if options.schedule != "auto":
        return [options.schedule]
    predicted = {name: us for name, us in _predicted(key).items() if name != DENSE}
    limit = _SHORTLIST * min(predicted.values())
    listed = [name for name, us in predicted.items() if us <= limit]
    in_chains = next((name for name in predicted if runs_in_chains(name, key.matrix)), None)
    return listed if in_chains is None or in_chains in listed else [*listed, in_chains]


def _predicted(key: Key) -> dict[str, float]:
    found = predict(key.matrix, key.tokens, key.threads, calibrated.this_machine())
    return {DENSE: found.dense_us, **dict(found.by_schedule)}


def _calibrate(contractions: Sequence[Contraction]) -> None:
    elements = {matrix_of(c).element for c in contractions if _measurable(c) and c.weight.density < 1}
    if missing := sorted(elements - calibrated.this_machine().measured):
        from gossamer.backend.measuring.calibrate import calibrate  # a program of its own, too: loaded when it is needed

        calibrate(missing)
