"""Numbers that are measured once a machine, and kept on disk.

What was measured while other processes used the machine is measured again in later processes, up to three times in all. What
cannot be is not kept.
"""

import json
from collections.abc import Callable, Sequence

from gossamer.backend.devices.calibrated import identity
from gossamer.backend.devices.others import Others
from gossamer.runtime import records

TRIES = 3


def kept(
    what: str,
    key: Sequence[object],
    measure: Callable[[], float],
    best: Callable[[Sequence[float]], float] = min,
    can_be: Callable[[float], bool] = lambda _: True,
) -> float:
    """The number that `measure` gave for this key, here and now or in an earlier process; of several the `best`.

    One that cannot be is returned only if it was measured now.
    """
    journal, name = f"{what}-{identity()}", json.dumps(key)
    disturbed = list[float]()
    for line in records.lines(journal):
        if (
            isinstance(line, dict)
            and line.get("key") == name
            and isinstance(line.get("value"), float)
            and can_be(line["value"])
        ):
            records.used(journal, line)
            if not line.get("disturbed"):
                return float(line["value"])
            disturbed.append(line["value"])
    if len(disturbed) >= TRIES:
        return best(disturbed)
    others = Others()
    value = measure()
    if not can_be(value):
        return value
    line = {"key": name, "value": value}
    if not others.disturb:
        records.append(journal, line)
        return value
    records.append(journal, {**line, "disturbed": True})
    return best([*disturbed, value])
