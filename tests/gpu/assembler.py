"""NVIDIA's assembler, from PyPI: proof that PTX is valid for an architecture, and what it costs in registers and memory."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import files
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """What one thread of a kernel takes: registers, and bytes that did not fit into them."""

    registers: int
    spilled: int


def assembled(ptx: str, capability: int) -> dict[str, Usage]:
    """The kernels of a module by name. AssertionError with the assembler's words if it refuses the text."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [_ptxas(), "-v", "-O3", f"-arch=sm_{capability}", str(source), "-o", f"{folder}/kernel.cubin"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = re.findall(report, run.stderr, re.DOTALL)
    return {name: Usage(int(registers), int(spilled)) for name, spilled, registers in found}


@cache
def _ptxas() -> str:
    (program,) = (f for f in files("nvidia-cuda-nvcc") or () if f.name in ("ptxas", "ptxas.exe"))
    return str(program.locate())
