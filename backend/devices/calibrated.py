"""Keeps the speed of this machine for the cost model: as calibrated, or else as usual for such machines.

A calibration is in doubt if other processes slowed the machine down meanwhile, or if later measurements differ much from
predictions. A later process then repeats it, a few times at most (measuring/calibrate.py).
"""

import logging
from functools import lru_cache
from pathlib import Path

from gossamer.backend.devices import pace
from gossamer.backend.devices.identity import identity
from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime import cache_files, records
from gossamer.runtime.target import host

log = logging.getLogger("gossamer")

_REPEATS = 3
"""How often a calibration is repeated before the last one is believed."""


def this_machine() -> Machine:
    """Returns this machine as calibrated. Element types that were not measured count as on a usual machine."""
    return _recorded(_record(), cache_files.directory(), records.loaded())


def keep(machine: Machine) -> None:
    """Records the speed that was measured, for this process and later ones."""
    records.write(_record(), machine.to_json())
    forget()


def in_doubt() -> bool:
    """Whether the calibration of this machine is to be repeated."""
    doubted, repeats, beside = _doubts()
    return (doubted or not pace.counts(beside)) and repeats < _REPEATS


def doubt() -> None:
    """Has a later process repeat the calibration of this machine."""
    _, repeats, beside = _doubts()
    records.write(_doubt_record(), {"doubted": True, "repeats": repeats, "beside": beside})


def settle(disturbed: bool, repeated: bool, beside: float | None = None) -> None:
    """Records how a calibration went. `repeated` says that it was not the first.

    It is in doubt if it was `disturbed`. It also becomes in doubt if the machine turns out to be faster than it was then.
    `beside` tells how fast: the microseconds of the loop of `pace` that was timed with the calibration.
    """
    repeats = _doubts()[1] + 1 if repeated else 0
    records.write(_doubt_record(), {"doubted": disturbed, "repeats": repeats, "beside": beside or 0.0})


def _doubts() -> tuple[bool, int, float]:
    """Returns whether the calibration is in doubt, how often it was repeated, and the loop beside it (0 if none was timed)."""
    found = records.read(_doubt_record())
    if not isinstance(found, dict) or type(found.get("repeats")) is not int:
        return False, 0, 0.0
    beside = found.get("beside")
    return found.get("doubted") is True, found["repeats"], beside if type(beside) is float else 0.0


def _doubt_record() -> str:
    return f"calibration-{identity()}"


def forget() -> None:
    """Has the next call of `this_machine` read the record again."""
    _recorded.cache_clear()


@lru_cache(maxsize=4)
def _recorded(record: str, _directory: Path | None, _loaded: int) -> Machine:
    here = host()
    bf16 = 4.7 if "amx" in here.instructions else 2.0 if here.rounds_to_bf16 else 1.0
    f16 = 4.7 if "+avx512fp16" in here.features.split(",") else 0.25  # without it torch converts number by number
    i8 = 8.0 if "+amx-int8" in here.features.split(",") else 4.0 if "bytedots" in here.instructions else 1.5
    usual, found = Machine.usual(here.vector_bits, 1 if here.cpu == "znver4" else 2, bf16, f16, i8), records.read(record)
    if found is None:
        return usual
    try:
        return usual.updated(found)
    except ValueError as problem:
        log.warning(
            "the calibration %s has impossible values (%s) and is ignored: gossamer.calibrate() replaces it", record, problem
        )
        return usual


def _record() -> str:
    return f"machine-{identity()}"
