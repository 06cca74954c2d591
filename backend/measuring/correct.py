"""Corrects the calibration of this machine by measured products, if its predictions were wrong.

    predicted lookup 100 us, measured 250 us at 16 tokens      →      lookup runs 2.5 times fewer cycles a microsecond
                                                                      there, in every prediction of this and later processes

One product may be odd. So the mean of all measured products counts, for each kernel and number of tokens. One correction
changes a speed by a factor of at most four. Weights that are much sparser than the reference weights do not count, because
kernels lose another share of their time between nonzeros there.
"""

import math
from collections.abc import Iterable

from gossamer.backend.devices import calibrated
from gossamer.backend.devices.measured_times import DENSE, Times, tokens_class
from gossamer.backend.measuring.tuning_db import Key
from gossamer.dialects.elements import WEIGHTS
from gossamer.passes.schedules.cost_model import Prediction, predict
from gossamer.passes.schedules.machine_speed import SPARSE, Machine

_LEAST_DENSITY = SPARSE / 2
_WRONG, _MOST = 1.5, 4.0
_LEAST_US = 10.0
"""Microseconds below which a time does not count, because the call takes most of it."""


def correct(measured: Iterable[tuple[Key, int, Times]]) -> None:
    """Corrects the calibration of this machine and keeps it. `measured` has keys, numbers of tokens and times."""
    machine = corrected(calibrated.this_machine(), measured)
    if machine is not None:
        calibrated.keep(machine)


def contradicted(measured: Iterable[tuple[Key, int, Times]]) -> bool:
    """Whether measured products contradict the calibration of this machine."""
    return corrected(calibrated.this_machine(), measured) is not None


def corrected(machine: Machine, measured: Iterable[tuple[Key, int, Times]]) -> Machine | None:
    """Returns the machine with corrected speeds; None if its predictions were about right."""
    wrong: dict[tuple[str, str, int, int], list[float]] = {}
    for key, tokens, times in measured:
        matrix = key.matrix
        if matrix.element not in machine.measured or matrix.given is not None or matrix.groups is not None:
            continue  # not calibrated, or two element types, where an error cannot be assigned to one
        found = predict(matrix, tokens, key.threads, machine)
        size = machine.speeds[matrix.element].nearest(matrix.rows * matrix.columns * WEIGHTS[matrix.element].bytes)
        for name, predicted in _by_name(found, machine).items():
            tells = name == DENSE or matrix.density >= _LEAST_DENSITY
            if tells and min(times.us.get(name, 0.0), predicted) >= _LEAST_US:
                place = matrix.element, name, tokens_class(tokens), size if name == DENSE else 0
                wrong.setdefault(place, []).append(math.log(times.us[name] / predicted))
    changed = None
    for (element, name, tokens, size), logs in wrong.items():
        slower = math.exp(sum(logs) / len(logs))
        if not 1 / _WRONG <= slower <= _WRONG:
            speed = (changed or machine).speeds[element]
            bounded = min(max(slower, 1 / _MOST), _MOST)
            slowed = speed.dense_slower(size, tokens, bounded) if name == DENSE else speed.slower(name, tokens, bounded)
            changed = (changed or machine).with_speed(element, slowed)
    return changed


def _by_name(found: Prediction, machine: Machine) -> dict[str, float]:
    """Returns predicted microseconds by name. They do not include the call, as measured times do not."""
    return {DENSE: found.dense_us} | {name: us - machine.call_us for name, us in found.by_schedule}
