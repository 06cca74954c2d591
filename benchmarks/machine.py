"""Where and with what the figures were taken."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gossamer.runtime.target import host

RESULTS = Path(__file__).parent / "results"
FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
PACKAGES = ("gossamer", "torch", "torch-mlir", "llvmlite", "transformers", "scipy", "mkl", "openvino", "onnxruntime",
            "torch-geometric", "sparse-dot-mkl", "sparse", "spconv")  # fmt: skip


def machine() -> dict[str, object]:
    """CPU model, microarchitecture as LLVM calls it, vector features, and the cores that this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "architecture": host().cpu,
        "features": [name for name in FEATURES if name in flags],
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": cores,
        "system": f"{platform.system()} {platform.machine()}",
    }


def record(name: str) -> Path:
    """Where runs of this machine are kept: the folder is named as the CPU and its microarchitecture."""
    here = machine()
    model = re.sub(r"\((r|tm)\)|\b(processor|cpu|\d+-core)\b|@.*", " ", str(here["cpu"]).lower())
    return RESULTS / "-".join(re.findall(r"\w+", f"{model} {here['architecture']}")) / f"{name}.json"


def cpu_seconds_elsewhere() -> float:
    """CPU seconds that everything but this process has used; 0 where /proc/stat does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def versions() -> dict[str, str]:
    """The version of each package that decides speed; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
