"""Measures products with a sparse weight: the most promising schedules against torch's dense product.

| mode           | products that are measured                                                                          |
|----------------|-----------------------------------------------------------------------------------------------------|
| "max-autotune" | all but those that are predicted to lose by far                                                     |
| others         | those whose gain is in doubt or whose schedules are close, within a limit of time (see `Budget`)    |

Contenders are the schedules that are predicted to take at most twice as long as the fastest, and the fastest that runs in
chains. The tuning database keeps the times. A product is not measured again if the database has its times or those of a similar
product. Measured times then replace predictions in all decisions about the product: dense or sparse, in a chain or not, and
which schedule for how many tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from gossamer.backend.devices import calibrated
from gossamer.backend.devices.budget import CLOSE, KEPT_S, Budget
from gossamer.backend.devices.device import device_of
from gossamer.backend.devices.measured_times import DENSE, Times, tokens_class
from gossamer.backend.devices.others import Others
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.measuring.correct import contradicted, correct
from gossamer.backend.measuring.kept import told
from gossamer.backend.measuring.measure import Product, fastest
from gossamer.backend.measuring.progress import progress
from gossamer.backend.measuring.tuning_db import Key, TuningDatabase
from gossamer.backend.regions.contractions import Contraction
from gossamer.backend.regions.cost import TOKEN_CLASSES, matrix_of, predicted, predicted_gain, usual_tokens
from gossamer.backend.regions.decide import refusal
from gossamer.backend.report.options import Options
from gossamer.passes.chains.products import runs_in_chains
from gossamer.passes.schedules.cost_model import predict

_HOPELESS = 0.5  # a product is not measured if it is predicted to reach less than this share of the wanted gain


def tuned(
    contractions: Sequence[Contraction], values: Mapping[fx.Node, torch.Tensor], options: Options, budget: Budget
) -> list[Contraction]:
    """Returns the contractions with their times, measured now or before.

    `values` holds the real value of every leaf of a weight. Contractions that are not measured stay as they are, such as those
    that no kernel can compute. With "max-autotune", calibrates the machine first if it is not calibrated.
    """
    if options.schedule == "reference" or (not budget.everything and (options.schedule != "auto" or options.min_gain == 0)):
        return list(contractions)
    if budget.everything:
        _calibrate(contractions)
    database = TuningDatabase()
    wanted = [_keys(c, budget) if _promising(c, options, budget) else {} for c in contractions]
    known: dict[Key, Times] = {}
    missing: dict[Key, tuple[Contraction, int]] = {}
    for contraction, keys in zip(contractions, wanted, strict=True):
        for key, tokens in keys.items():
            if times := _remembered(key, options, database):
                known[key] = times
            else:
                missing.setdefault(key, (contraction, tokens))
    if missing:
        known |= _measured(missing, values, options, database, budget)
    return [
        dataclasses.replace(c, times={key.tokens: known[key] for key in keys if key in known})
        for c, keys in zip(contractions, wanted, strict=True)
    ]


def _measured(
    missing: Mapping[Key, tuple[Contraction, int]],
    values: Mapping[fx.Node, torch.Tensor],
    options: Options,
    database: TuningDatabase,
    budget: Budget,
) -> dict[Key, Times]:
    known: dict[Key, Times] = {}
    measured: list[tuple[Key, int, Times]] = []
    product, owner = None, None
    ordered = list(missing.items())
    if not budget.everything:
        ordered.sort(key=lambda item: (not _doubted(item[1][0], budget), -_predicted(item[0])[DENSE]))
    with progress("gossamer measures", len(missing)) as bar:
        for key, (contraction, tokens) in ordered:
            m = key.matrix
            bar.advance(f"{m.rows}x{m.columns} {m.density:.0%}, {tokens} tokens")
            if times := _remembered(key, options, database):  # measured a moment ago, or similar to one that was
                known[key] = times
                continue
            doubted = budget.everything or _doubted(contraction, budget)
            if not (budget.allows(KEPT_S) if doubted else _compared(contraction, budget)):
                continue
            with budget.spend(doubted):
                if product is None or contraction is not owner:
                    weight = run(contraction.weight.evaluate, [values[leaf] for leaf in contraction.weight.leaves])
                    product, owner = Product(weight.detach(), m), contraction
                calls = product.calls(tokens, _shortlist(key, options))
                if len(calls) < 2:
                    continue
                others = Others()
                times, disturbed = Times(fastest(calls, key.threads)), others.disturb
            if not times.are_believable(_predicted(key)):  # this process uses the prediction, a later one measures again
                budget.settled = False
                if not disturbed:
                    calibrated.doubt()
                continue
            known[key] = database.add(key, times, told(others)) if options.schedule == "auto" else times
            if not disturbed:
                measured.append((key, tokens, times))
    if budget.everything:
        correct(measured)
    elif contradicted(measured):
        calibrated.doubt()
    return known


def _remembered(key: Key, options: Options, database: TuningDatabase) -> Times | None:
    """Returns the times of a key, or of a similar one, from the database; None if the key is to be measured."""
    times = database.find(key)
    if times is not None and not (database.is_settled(key) and times.are_believable(_predicted(key))):
        return None
    times = times or database.similar(key, _predicted)
    return times if times and (options.schedule == "auto" or options.schedule in times.us) else None


def _keys(contraction: Contraction, budget: Budget) -> dict[Key, int]:
    """Returns the keys to be measured of a contraction, each with the number of tokens to measure it with.

    With dynamic tokens and limited time, this is one key, for the usual number of tokens.
    """
    matrix, threads = matrix_of(contraction), torch.get_num_threads()
    usual = usual_tokens(contraction)
    any_number = [*TOKEN_CLASSES, max(usual, 2 * TOKEN_CLASSES[-1])] if contraction.dynamic and budget.everything else []
    counts = {tokens_class(t): t for t in [*any_number, usual]}
    return {Key(matrix, tokens, threads): count for tokens, count in counts.items()}


def _promising(contraction: Contraction, options: Options, budget: Budget) -> bool:
    if not _measurable(contraction) or usual_tokens(contraction) == 0:
        return False
    if not budget.everything:
        return contraction.weight.density < 1 and (_doubted(contraction, budget) or _compared(contraction, budget))
    return options.min_gain == 0 or predicted_gain(contraction) >= _HOPELESS * options.min_gain


def _doubted(contraction: Contraction, budget: Budget) -> bool:
    """Whether the cost model cannot tell if the product gains."""
    dense_us = predicted(contraction, usual_tokens(contraction)).dense_us
    return budget.doubts(predicted_gain(contraction), dense_us, contraction.weight.density)


def _compared(contraction: Contraction, budget: Budget) -> bool:
    """Whether the product is predicted to gain, but several schedules are close."""
    us = [us for _, us in predicted(contraction, usual_tokens(contraction)).by_schedule]
    return budget.compares(predicted_gain(contraction), us)


def _measurable(contraction: Contraction) -> bool:
    """Whether the device can compute the product and times can be measured there."""
    return refusal(contraction) is None and not contraction.quantized and device_of(contraction.weight.device).measures


def _shortlist(key: Key, options: Options) -> list[str]:
    if options.schedule != "auto":
        return [options.schedule]
    us_of = {name: us for name, us in _predicted(key).items() if name != DENSE}
    listed = [name for name, us in us_of.items() if us <= CLOSE * min(us_of.values())]
    in_chains = next((name for name in us_of if runs_in_chains(name, key.matrix)), None)
    return listed if in_chains is None or in_chains in listed else [*listed, in_chains]


def _predicted(key: Key) -> dict[str, float]:
    found = predict(key.matrix, key.tokens, key.threads, calibrated.this_machine())
    return {DENSE: found.dense_us, **dict(found.by_schedule)}


def _calibrate(contractions: Sequence[Contraction]) -> None:
    elements = {matrix_of(c).element for c in contractions if _measurable(c) and c.weight.density < 1}
    if missing := sorted(elements - calibrated.this_machine().measured):
        from gossamer.backend.measuring.calibrate import calibrate  # loaded only if needed

        calibrate(missing)
