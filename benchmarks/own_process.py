"""Runs a measurement in a new process, whose caches are in a given folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def printed(module: str, arguments: Sequence[object], caches: Path) -> dict[str, Any]:
    """The JSON on the last line that `python -m module` prints. RuntimeError with its last line if it fails."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "GOSSAMER_CACHE_DIR": str(caches / "gossamer")}
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[3:])} failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
