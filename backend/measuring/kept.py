"""Measures numbers once for a machine, and keeps them on disk.

If other processes slowed the machine down, later processes measure again: up to three times in all, and after that only while
nobody disturbs. Impossible numbers are not kept.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gossamer.backend.devices import pace
from gossamer.backend.devices.identity import identity
from gossamer.backend.devices.others import Others, quiet_now
from gossamer.runtime import records

TRIES, MOST_TRIES = 3, 9
"""How often a number is measured while others disturb, and how often in all."""


def kept(
    what: str,
    key: Sequence[object],
    measure: Callable[[], float],
    best: Callable[[Sequence[float]], float] = min,
    can_be: Callable[[float], bool] = lambda _: True,
) -> float:
    """Returns the result of `measure` for this key, from disk or measured now. `what` names the journal.

    best    chooses from several disturbed results
    can_be  whether a result is possible. One that is not is returned, but not kept
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
    """Returns the entries of a journal line that say how much other processes disturbed the measurement."""
    return ({} if others.beside is None else {"beside": others.beside}) | ({"disturbed": True} if others.disturb else {})


def was_disturbed(line: Mapping[str, Any]) -> bool:
    """Whether others disturbed the measurement of a line, as far as is known by now."""
    beside = line.get("beside")
    return bool(line.get("disturbed")) or (type(beside) is float and not pace.counts(beside))


def may_try_again(tries: int) -> bool:
    """Whether to measure again after so many disturbed tries: only while nobody disturbs, and nine times at most."""
    return tries < MOST_TRIES and quiet_now()
