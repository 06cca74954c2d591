"""Machines that a test run can pretend to be: `pytest --machine avx2`, say.

From x86 features are only taken away, so that the code for each machine runs wherever the suite does; what a machine has in
addition (AMX) is emulated by the tests that need it. Code for 64-bit ARM runs in an emulator (tests/arm64/emulator.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from llvmlite import binding as llvm

from gossamer.runtime import data_cache, jit
from gossamer.runtime import target as targets
from gossamer.runtime.target import Target, host
from tests.arm64 import emulator


@dataclass(frozen=True)
class Machine:
    """A CPU as LLVM calls it, its first-level data cache in bytes, threads, and how names of features begin that it lacks;
    those of another architecture have a `target` instead."""

    cpu: str
    l1d: int
    threads: int
    lacks: tuple[str, ...] = ()
    target: str | None = None


MACHINES = {
    "avx2": Machine("x86-64-v3", 32 << 10, 1, ("avx512", "avx10", "amx", "avxvnni", "avxneconvert", "avxifma")),
    "icelake": Machine("icelake-server", 48 << 10, 1, ("avx512bf16", "avx512fp16", "avx10", "amx", "avxvnni", "avxneconvert")),
    "zen4": Machine("znver4", 32 << 10, 2, ("avx512fp16", "avx10", "amx", "avxvnni", "avxneconvert")),
    "neoverse-n1": Machine("neoverse-n1", 64 << 10, 1, target="neoverse-n1"),
    "neoverse-v1": Machine("neoverse-v1", 64 << 10, 2, target="neoverse-v1"),
    "apple-m1": Machine("apple-m1", 128 << 10, 1, target="apple-m1"),
}


def pretend(machine: Machine, directory: Path, set_attribute: Callable[[object, str, object], None]) -> None:
    """From now on this process is told of another machine; `directory` is an empty one, where its cache is described."""
    if machine.target is None:
        features = llvm.get_host_cpu_features()
        features.update({name: False for name in features if name.startswith(machine.lacks)})
    else:
        features = _elsewhere(Target.named(machine.target), set_attribute)
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


def _elsewhere(target: Target, set_attribute: Callable[[object, str, object], None]) -> llvm.FeatureMap:
    """Has an emulator run this process's kernels, as Linux does on such a machine. The features of the target."""
    set_attribute(llvm, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    set_attribute(targets, "_arm_features", dict)
    set_attribute(jit, "load", emulator.load)
    return llvm.FeatureMap({feature[1:]: feature[0] == "+" for feature in target.features.split(",")})
