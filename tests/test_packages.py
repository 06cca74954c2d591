"""The wheel and the sdist as users get them: in an environment that has the dependencies, and nothing of the checkout."""

import importlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import gossamer.runtime

pytest.importorskip("build", reason="pip install build makes the packages")
pytest.importorskip("setuptools", minversion="77", reason="which makes the packages")

ROOT = Path(__file__).parents[1]
ROOMS = ("gossamer", "backend", "sparsity", "passes", "dialects", "runtime")
PROGRAM = """
from pathlib import Path

import torch
import gossamer
import gossamer.__main__

place = Path(gossamer.__file__).parent
assert "{site}" in str(place), place
assert (place / "py.typed").is_file() and (place / "backend" / "page" / "vendor" / "LICENSES.txt").is_file()
assert gossamer.__main__.main([]) == 0
model, x = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64)).eval(), torch.randn(8, 64)
gossamer.prune(model, [x], sparsity=0.9)
with torch.no_grad():
    options = {{"dense": "eager", "min_gain": 0, "strict": True}}
    found = torch.compile(model, backend="sparse", fullgraph=True, options=options)(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)
    report = gossamer.explain(model, x, options=options)
assert len(report.sparse) == 2
report.save("report.html")
assert "Gossamer report" in Path("report.html").read_text()
print("all is there")
"""
TYPED = """
from collections.abc import Callable
from typing import assert_type

import torch

import gossamer

model = torch.nn.Linear(8, 8)
x = torch.randn(4, 8)
report = gossamer.explain(model, x)
assert_type(report, gossamer.Report)
assert_type(report.decisions, list[gossamer.Decision])
assert_type(report.decisions[0].density, float)
assert_type(gossamer.profile(model, x).us, float)
assert_type(gossamer.SparseTensor.from_dense(x).shape, torch.Size)
assert_type(gossamer.Format.CSR, gossamer.Format)
assert_type(gossamer.train_sparse(model, torch.optim.SGD(model.parameters()), "rigl"), gossamer.SparseTraining)
caught: type[Exception] = gossamer.OptionError
assert_type(gossamer.recipes.Cubic(1, 2), gossamer.recipes.Cubic)
wrap: Callable[..., object] = gossamer.distributed.data_parallel
verbs: list[Callable[..., object]] = [gossamer.prune, gossamer.quantize, gossamer.bisect]
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that is built from it."""
    source, made = tmp_path_factory.mktemp("source") / "gossamer", tmp_path_factory.mktemp("dist")
    source.mkdir()
    for name in ROOMS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, source)
    return made


@pytest.fixture(scope="module")
def python(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, which finds other packages where this one does."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    found = folder / "bin" / "python"
    (wheel,) = packages.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", found, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (site,) = (folder / "lib").glob("*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own; without what editable ones add
    return found


def run(*command: object, cwd: Path | None = None) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_packages_have_all_files_of_the_rooms(packages: Path) -> None:
    (wheel,), (sdist,) = packages.glob("*.whl"), packages.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as tar:
        inside, packed = set(archive.namelist()), {name.partition("/")[2] for name in tar.getnames()}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            name = str(path.relative_to(ROOT))
            if path.is_file() and "__pycache__" not in name:
                assert (name if room == "gossamer" else f"gossamer/{name}") in inside, f"the wheel lacks {name}"
                assert name in packed, f"the sdist lacks {name}"


def test_the_wheel_works_in_a_clean_environment(python: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(site=python.parents[1]))
    output = run(python, "program.py", cwd=tmp_path)
    assert "self-test" in output and "passed" in output and output.endswith("all is there\n")


def test_mypy_knows_the_types_from_outside(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    command = ["--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache"]
    assert "Success" in run(sys.executable, "-m", "mypy", *command, "user.py", cwd=tmp_path)


def test_pyright_knows_the_types_from_outside(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    (tmp_path / "user.py").write_text(TYPED)
    command = ["--pythonpath", python, "--level", "error"]
    assert "0 errors" in run(sys.executable, "-m", "basedpyright", *command, "user.py", cwd=tmp_path)


def test_an_old_torch_is_told_of_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer, but torch 2\.9\.1\+cpu is installed in .*torch"):
        importlib.reload(gossamer.runtime)
    monkeypatch.undo()
    importlib.reload(gossamer.runtime)


def test_the_oldest_torch_is_the_one_that_the_package_asks_for() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={gossamer.runtime.OLDEST_TORCH}" in asked
