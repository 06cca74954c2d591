"""Describes the machine on which a report was made, for its page."""

import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from gossamer.runtime.target import host


def this_machine() -> dict[str, Any]:
    """Returns the processor, its vector bits, the number of threads, and the versions of torch and Gossamer."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "bits": host().vector_bits,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gossamer": sys.modules["gossamer"].__version__,  # also without metadata, in a source tree
    }
