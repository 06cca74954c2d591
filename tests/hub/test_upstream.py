"""docs/upstream: the patches apply to the installed packages, and their tests pass with the patched file and not without."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "upstream"
FILES = {"accelerate": "accelerate/utils/dataclasses.py", "transformers": "transformers/generation/utils.py"}
RUN = """
import importlib.abc, importlib.util, sys, unittest
class Patched(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_file_location(name, {file!r}) if name == {module!r} else None
if {patched}:
    sys.meta_path.insert(0, Patched())
sys.path.insert(0, {tests!r})
unittest.main(module="test_sparse_backend", argv=["test"])
"""


@pytest.mark.parametrize("package", [*FILES])
def test_a_patch_applies_and_its_test_needs_it(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec(package)
    if spec is None or spec.origin is None or shutil.which("git") is None:
        pytest.skip(f"{package} or git is not installed")
    copied = tmp_path / "src" / FILES[package]
    copied.parent.mkdir(parents=True)
    shutil.copy(Path(spec.origin).parents[1] / FILES[package], copied)
    subprocess.run(["git", "apply", str(FOLDER / f"{package}.patch")], cwd=tmp_path, check=True)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # without our own registration
    module = FILES[package].removesuffix(".py").replace("/", ".")
    ended = {}
    for patched in (True, False):
        program = RUN.format(file=str(copied), module=module, tests=str(tmp_path / "tests"), patched=patched)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
        ended[patched] = done.returncode == 0, done.stderr
    assert ended[True][0], ended[True][1]
    assert not ended[False][0]
