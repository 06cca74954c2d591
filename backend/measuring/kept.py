"""Numbers that are measured once a machine, and kept on disk."""

import json
from collections.abc import Callable, Sequence

from gossamer.backend.devices.calibrated import identity
from gossamer.runtime import records


def kept(what: str, key: Sequence[object], measure: Callable[[], float]) -> float:
    """The number that `measure` gave for this key, here and now or in an earlier process."""
    journal, name = f"{what}-{identity()}", json.dumps(key)
    for line in records.lines(journal):
        if isinstance(line, dict) and line.get("key") == name and isinstance(line.get("value"), float):
            records.used(journal, line)
            return float(line["value"])
    value = measure()
    records.append(journal, {"key": name, "value": value})
    return value
