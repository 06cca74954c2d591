"""Packages of AOTInductor, as processes without Gossamer run them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_LOADED = """
import sys, torch
given, expected, path = *torch.load(sys.argv[1]), sys.argv[2]
model = torch._inductor.aoti_load_package(path)
for inputs, wanted in zip(given, expected, strict=True):
    torch.testing.assert_close(model(*inputs), wanted, rtol=1e-4, atol=1e-4)
assert not [name for name in sys.modules if name.startswith("gossamer")]
print("all is there")
"""


def check_in_a_fresh_process(program: torch.export.ExportedProgram, model: Any, given: Sequence[Any], folder: Path) -> None:
    """Makes a package, and compares what a process without Gossamer gets for several inputs with what the model gives."""
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    with torch.no_grad():
        torch.save((given, [model(*inputs) for inputs in given]), folder / "expected.pt")
    done = run_apart(_LOADED, folder / "expected.pt", package)
    assert "all is there" in done


def run_apart(code: str, *arguments: object) -> str:
    """What a fresh process of Python writes."""
    surroundings = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch imports plug-ins otherwise
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=surroundings, cwd="/", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
