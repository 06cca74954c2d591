"""Numbers that are measured once a machine, and kept on disk.

What was measured while other processes slowed down the machine is measured again in later processes: three times, and then only
while nobody does. What cannot be is not kept.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gossamer.backend.devices import pace
from gossamer.backend.devices.identity import identity
from gossamer.backend.devices.others import Others, quiet_now
from gossamer.runtime import records

TRIES, MOST_TRIES = 3, 9
"""How often something is measured while others disturb, and in all."""


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
            if not was_disturbed(line):
                return float(line["value"])
            disturbed.append(line["value"])
    if len(disturbed) >= TRIES and not may_try_again(len(disturbed)):
        return best(disturbed)
    others = Others()
    value = measure()
    if not can_be(value):
        return value
    records.append(journal, {"key": name, "value": value} | told(others))
    return best([*disturbed, value]) if others.disturb else value


def told(others: Others) -> dict[str, Any]:
    """What the line of a measurement says of the others meanwhile."""
    return ({} if others.beside is None else {"beside": others.beside}) | ({"disturbed": True} if others.disturb else {})


def was_disturbed(line: Mapping[str, Any]) -> bool:
    """Whether others disturbed the measurement of a line, as far as it is known by now."""
    beside = line.get("beside")
    return bool(line.get("disturbed")) or (type(beside) is float and not pace.counts(beside))


def may_try_again(tries: int) -> bool:
    """Whether something is measured again that was disturbed so often: only while nobody disturbs."""
    return tries < MOST_TRIES and quiet_now()
