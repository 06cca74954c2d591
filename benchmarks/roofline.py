"""What the machine can do, measured in the same run, and what a result makes of it.

The roof of a kernel that computes `flops` on `bytes` is min(peak, flops / bytes · bandwidth): the peak is that of the
fastest dense product found here, the bandwidth that of a copy within the innermost cache that holds the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import Outcome, Work

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TYPICAL = {"l2": 1 << 20, "l3": 32 << 20}
_MINIMUM_OF = 7
_LONGEST = 0.1  # seconds of a call that need not be repeated, nor with larger operands


def seconds(call: Callable[[], object]) -> float:
    """The least of a few runs, after one that does not count, unless it took long already."""

    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    first = once()
    return first if first > _LONGEST else min(once() for _ in range(_MINIMUM_OF))


def peak_gflops(dtype: torch.dtype) -> float:
    """The fastest of MKL's and oneDNN's square products, in GF/s, with the threads that torch has now."""
    best = 0.0
    for size in (512, 1024, 1536):
        a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
        calls: list[Callable[[], object]] = [partial(torch.mm, a, b, out=torch.empty_like(a))]
        if torch.backends.mkldnn.is_available() and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            operands = a.to_mkldnn(), b.to_mkldnn(), torch.zeros(size, dtype=dtype).to_mkldnn()
            calls.append(partial(torch._C._nn.mkldnn_linear, *operands))
        times = [seconds(call) for call in calls]
        best = max(best, 2 * size**3 / min(times) / 1e9)
        if min(times) > _LONGEST:  # a processor without instructions for this type
            break
    return best


def peak_int8() -> float:
    """The fastest of oneDNN's square products of int8, in billions of multiplications and additions a second."""
    best = 0.0
    for size in (512, 1024, 1536):
        a, b = (torch.randint(-127, 128, (size, size), dtype=torch.int8) for _ in range(2))
        taken = seconds(partial(torch._int_mm, a, b.t()))
        best = max(best, 2 * size**3 / taken / 1e9)
        if taken > _LONGEST:
            break
    return best


def copy_gbytes(footprint: int) -> float:
    """GB/s, read and written, of copying one half of `footprint` bytes to the other."""
    source = torch.ones(footprint // 8)
    target = torch.empty_like(source)
    times = max(1, (64 << 20) // footprint)

    def copies() -> None:
        for _ in range(times):
            target.copy_(source)

    return times * 2 * source.nbytes / seconds(copies) / 1e9


def cache_sizes() -> dict[str, int]:
    """Bytes of a core's second-level cache and of the third level."""
    found = dict(_TYPICAL)
    for index in _CACHES.glob("index*"):
        level = f"l{(index / 'level').read_text().strip()}"
        size = (index / "size").read_text().strip()
        if level in found and size.endswith("K"):
            found[level] = int(size[:-1]) << 10
    return found


def peaks(threads: int) -> dict[str, Any]:
    """GF/s of dense products and GB/s of copies within each level of memory; about two seconds."""
    torch.set_num_threads(threads)
    caches = cache_sizes()
    levels = {"l2": caches["l2"] * threads, "l3": caches["l3"], "dram": None}
    far = max(4 * caches["l3"], min(16 * caches["l3"], 1 << 30))  # a virtual machine may be shown too small a cache
    copied = {"l2": caches["l2"] * threads // 2, "l3": min(caches["l3"] // 2, 12 << 20), "dram": far}
    return {
        "f32_gflops": peak_gflops(torch.float32),
        "bf16_gflops": peak_gflops(torch.bfloat16),
        "int8_gflops": peak_int8(),
        "levels": {name: {"bytes": size, "copy_gbytes_s": copy_gbytes(copied[name])} for name, size in levels.items()},
    }


def placed(milliseconds: float, work: Work, weights: int, precision: str, machine: dict[str, Any]) -> Outcome:
    """Where a result lies under the roof: useful GF/s, useful operations a byte, and the GF/s that these allow.

    `weights` is the number of bytes that the contender's weights take, `machine` the peaks at its number of threads.
    """
    moved = weights + work.activations
    level = next(found for found in machine["levels"].values() if found["bytes"] is None or moved <= found["bytes"])
    intensity = work.nonzero_flops / moved
    computed = "f32" if precision == "int4" else precision  # integers of 4 bits are weights alone
    roof = min(machine[f"{computed}_gflops"], intensity * level["copy_gbytes_s"])
    return {"useful_gflops": work.nonzero_flops / milliseconds / 1e6, "intensity": intensity, "roof_gflops": roof}
