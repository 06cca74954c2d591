"""This machine, as the cost model knows it: as a calibration found it, or else as such machines usually are.

A calibration is in doubt if other processes used the machine meanwhile, or if products that were measured later took far more
or less time than it predicts. It is repeated then, a few times at most.
"""

import hashlib
import logging
from functools import cache, lru_cache
from pathlib import Path

import torch

from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime import cache_files, records
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.target import host
from gossamer.runtime.versions import compiler

log = logging.getLogger("gossamer")

_REPEATS = 3
"""Calibrations of a machine that were repeated, after which the last one is believed."""


def this_machine() -> Machine:
    """This machine as calibrated; element types that were not measured are as fast as on a usual machine."""
    return _recorded(_record(), cache_files.directory(), records.loaded())


def keep(machine: Machine) -> None:
    """Record what was measured, for this process and those to come."""
    records.write(_record(), machine.to_json())
    forget()


def in_doubt() -> bool:
    """Whether the calibration of this machine is to be repeated."""
    doubted, repeats = _doubts()
    return doubted and repeats < _REPEATS


def doubt() -> None:
    """Have a later process repeat the calibration of this machine."""
    records.write(_doubt_record(), {"doubted": True, "repeats": _doubts()[1]})


def settle(disturbed: bool, repeated: bool) -> None:
    """Record how a calibration went, which is in doubt if it was disturbed; the first one, or one more that was repeated."""
    records.write(_doubt_record(), {"doubted": disturbed, "repeats": _doubts()[1] + 1 if repeated else 0})


def _doubts() -> tuple[bool, int]:
    """Whether the calibration is in doubt, and how often it was repeated."""
    found = records.read(_doubt_record())
    if not isinstance(found, dict) or type(found.get("repeats")) is not int:
        return False, 0
    return found.get("doubted") is True, found["repeats"]


def _doubt_record() -> str:
    return f"calibration-{identity()}"


def forget() -> None:
    """Read the record anew when the machine is asked for next."""
    _recorded.cache_clear()


@cache
def identity() -> str:
    """A hash of the CPU and of all versions that its speed depends on."""
    described = f"{cpu_name()}\n{host()}\n{first_level_bytes()}\n{torch.__version__}\n{compiler()}"
    return hashlib.sha256(described.encode()).hexdigest()[:16]


@cache
def cpu_name() -> str:
    """What the CPU is called."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        named = []
    return named[0] if named else host().cpu


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
