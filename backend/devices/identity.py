"""Identifies the CPU and the versions that the speed of this machine depends on. Names of measurement records contain it."""

import hashlib
from functools import cache

import torch

from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.target import host
from gossamer.runtime.versions import compiler


@cache
def identity() -> str:
    """Returns a hash of the CPU and of all versions that its speed depends on."""
    described = f"{cpu_name()}\n{host()}\n{first_level_bytes()}\n{torch.__version__}\n{compiler()}"
    return hashlib.sha256(described.encode()).hexdigest()[:16]


@cache
def cpu_name() -> str:
    """Returns the name of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        named = []
    return named[0] if named else host().cpu
