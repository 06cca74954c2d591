"""Machines that a test run can pretend to be: `pytest --machine avx2`, say.

Features are only taken away, so that the code for each machine runs wherever the suite does; what a machine has in addition
(AMX) is emulated by the tests that need it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from llvmlite import binding as llvm

from gossamer.runtime import data_cache
from gossamer.runtime.target import host


@dataclass(frozen=True)
class Machine:
    """A CPU as LLVM calls it, its first-level data cache in bytes, threads, and how names of features begin that it lacks."""

    cpu: str
    l1d: int
    threads: int
    lacks: tuple[str, ...]


MACHINES = {
    "avx2": Machine("x86-64-v3", 32 << 10, 1, ("avx512", "avx10", "amx", "avxvnni", "avxneconvert", "avxifma")),
    "icelake": Machine("icelake-server", 48 << 10, 1, ("avx512bf16", "avx512fp16", "avx10", "amx", "avxvnni", "avxneconvert")),
    "zen4": Machine("znver4", 32 << 10, 2, ("avx512fp16", "avx10", "amx", "avxvnni", "avxneconvert")),
}


def pretend(machine: Machine, directory: Path, set_attribute: Callable[[object, str, object], None]) -> None:
    """From now on this process is told of another machine; `directory` is an empty one, where its cache is described."""
    features = llvm.get_host_cpu_features()
    features.update({name: False for name in features if name.startswith(machine.lacks)})
    set_attribute(llvm, "get_host_cpu_features", lambda: features)
    set_attribute(llvm, "get_host_cpu_name", lambda: machine.cpu)
    set_attribute(data_cache, "_CACHES", directory)
    entry = directory / "index0"
    entry.mkdir()
    for name, text in (("level", "1"), ("type", "Data"), ("size", f"{machine.l1d >> 10}K")):
        (entry / name).write_text(text)
    data_cache.first_level_bytes.cache_clear()
    host.cache_clear()
    torch.set_num_threads(machine.threads)
