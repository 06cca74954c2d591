"""What makes code out of kernel IR: versions, for the keys under which code and decisions are kept."""

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from gossamer.dialects.errors import CompileError


@cache
def compiler() -> str:
    """What turns kernel IR into code: the versions of MLIR and LLVM, and a hash of our own source, which a version does not
    pin down while it is worked on."""
    source = source_hash("gossamer.dialects", "gossamer.passes", "gossamer.runtime")
    return f"torch-mlir {version('torch-mlir')} llvmlite {version('llvmlite')} gossamer {source}"


@cache
def source_hash(*packages: str) -> str:
    """A hash of the Python files of some packages and all below them, which are not imported."""
    found = hashlib.sha256()
    for package in packages:
        folder = _folder(package)
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])
