"""A report as plain data: what its page shows, and what a dump folder keeps of it."""

import platform
import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gossamer.runtime.target import host

if TYPE_CHECKING:
    from gossamer.backend.report.table import Report


def data_of(report: "Report") -> dict[str, Any]:
    """The report as JSON can hold it."""
    other = report.other
    return {
        "training": report.training,
        "min_gain": report.min_gain,
        "decisions": [asdict(decision) for decision in report.decisions],
        "patterns": report.patterns,
        "breaks": report.graph_breaks,
        "off": report.off,
        "seconds": report.seconds,
        "dense_bytes": report.dense_bytes,
        "packed_bytes": report.packed_bytes,
        **_counts(report),
        "other": other and {"training": other.training, **_counts(other)},
        "machine": _machine(),
    }


def _counts(report: "Report") -> dict[str, int]:
    sparse = sum(report.layers.values())
    return {"sparse": sparse, "dense": len(report.layers) - sparse, "kernels": report.kernels}


def _machine() -> dict[str, Any]:
    """Where the report was made."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "bits": host().vector_bits,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gossamer": version("gossamer"),
    }
