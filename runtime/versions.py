"""Returns versions of everything that turns kernel IR into code. The keys of cached code and decisions include them."""

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from gossamer.dialects.errors import CompileError


@cache
def compiler() -> str:
    """Returns the versions of MLIR and LLVM, and a hash of Gossamer's source, which changes more often than its version."""
    source = source_hash("gossamer.dialects", "gossamer.passes", "gossamer.runtime")
    return f"torch-mlir {version('torch-mlir')} llvmlite {version('llvmlite')} gossamer {source}"


@cache
def source_hash(*packages: str) -> str:
    """Returns a hash of all Python files in these packages and below. Does not import them."""
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
