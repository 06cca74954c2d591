"""Torch's portable cache: what one process has compiled starts as fast in another directory, in a process without imports."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

from gossamer.backend import torch_libraries
from gossamer.backend.devices import calibrated
from gossamer.backend.devices.identity import identity
from gossamer.backend.devices.measured_times import DENSE, Times
from gossamer.backend.measuring import tuning_db
from gossamer.backend.measuring.kept import kept
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.machine_speed import Curve, Machine
from gossamer.runtime import disk_cache, records

MODEL = """
import json, sys, torch
from torch import nn

def compiled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LogSoftmax(-1)).eval()
    for layer in (model[0], model[2]):
        layer.weight.data[torch.rand_like(layer.weight) < 0.9] = 0
    x = torch.randn(5, 64)
    with torch.no_grad():
        y = torch.compile(model, backend="sparse", fullgraph=True, options={"min_gain": 0})(x)
        torch.testing.assert_close(y, model(x))
"""

FIRST = f"""{MODEL}
from tests.backend.test_portable_cache import keep_measured
keep_measured()
compiled()
artifacts, info = torch.compiler.save_cache_artifacts()
open(sys.argv[1], "wb").write(artifacts)
print(json.dumps(info.artifacts))
"""

SECOND = f"""{MODEL}
info = torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read())
compiled()
from torch._dynamo.utils import counters
heavy = {{"torch_mlir", "gossamer.passes.pipelines", "gossamer.backend.measuring.calibrate"}}
print(json.dumps([info.artifacts, counters["aot_autograd"]["autograd_cache_hit"], sorted(heavy & sys.modules.keys())]))
"""


def keep_measured() -> Machine:
    """As if this machine had been calibrated for f32."""
    machine = replace(calibrated.this_machine(), name="measured")
    families = {"broadcast": Curve(((1, 3000.0), (16, 3100.5)))}
    speed = replace(machine.speeds["f32"], families=families, half=families)
    calibrated.keep(machine := machine.with_speed("f32", speed))
    return machine


def test_another_directory_starts_without_any_compiler_or_measurement(tmp_path: Path) -> None:
    """Nor an import of gossamer: torch is told of its artifacts by the plug-in that `pip install` puts there."""
    compiler, log = tmp_path / "c++", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec g++ "$@"\n')
    compiler.chmod(0o755)

    def run(program: str, user: str) -> Any:
        caches = {
            "GOSSAMER_CACHE_DIR": str(tmp_path / user / "gossamer"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / user / "inductor"),
        }
        environment = {**os.environ, **caches, "CXX": str(compiler)}
        command = [sys.executable, "-c", program, str(tmp_path / "artifacts")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def built() -> int:
        """How often it was asked for code; with -E torch makes a hash of its headers, which a warm start does, too."""
        return sum(" -o " in line and " -E " not in line for line in log.read_text().splitlines())

    saved = run(FIRST, "one")
    assert built() > 0
    log.write_text("")
    loaded, hits, heavy = run(SECOND, "another")
    assert loaded == saved and {"gossamer", "gossamer_records", "inductor", "aot_autograd"} <= loaded.keys()
    assert (hits, heavy, built()) == (1, [], 0), log.read_text()


@pytest.fixture
def other_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path / "one"))
    return tmp_path / "another"


def test_what_was_measured_goes_along(other_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CacheArtifactManager.with_fresh_cache():
        machine = keep_measured()
        key = tuning_db.Key(Matrix(64, 96, 1, "f32", 512, 0.1), 16, 1)
        tuning_db.TuningDatabase().add(key, Times({DENSE: 2.0, "broadcast": 1.0}))
        assert kept("convolution", [1, 2], lambda: 3.0) == 3.0
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None and len(saved[1].artifacts["gossamer_records"]) == 3
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(other_directory))
    assert not calibrated.this_machine().measured, "which is then kept in memory"
    for _ in range(2):
        torch.compiler.load_cache_artifacts(saved[0])
        assert calibrated.this_machine().to_json() == machine.to_json()
        assert len(tuning_db.TuningDatabase()) == 1
        assert kept("convolution", [1, 2], lambda: 4.0) == 3.0
        assert len(records.lines(f"convolution-{identity()}")) == 1, "once is enough"
    with CacheArtifactManager.with_fresh_cache():  # and from there on
        calibrated.forget()
        calibrated.this_machine()
        (again,) = tuning_db.TuningDatabase()._entries
        tuning_db.TuningDatabase().find(again)
        kept("convolution", [1, 2], lambda: 4.0)
        saved_again = torch.compiler.save_cache_artifacts()
    assert saved_again is not None and saved_again[1] == saved[1]


def test_what_is_loaded_takes_the_place_of_an_older_measurement(other_directory: Path) -> None:
    with CacheArtifactManager.with_fresh_cache():
        records.write("d", {"a": 1})
        saved = torch.compiler.save_cache_artifacts()
    records.write("d", {"a": 2})
    assert saved is not None and torch.compiler.load_cache_artifacts(saved[0])
    assert records.read("d") == {"a": 1}


@pytest.mark.parametrize("key", ["../d.json", "/tmp/d.json", ".json", "d.o", "d", "d\n.json", f"{'x' * 1000}.json"])
def test_a_record_cannot_leave_the_directory(key: str, other_directory: Path) -> None:
    records._Artifact(key, b"1").populate_cache()
    assert not [*other_directory.parent.rglob("d*")]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_a_damaged_record_is_left_out(content: bytes, other_directory: Path) -> None:
    records.write("d", 1)
    records._Artifact("d.json", content).populate_cache()
    records._Artifact("j.jsonl", content).populate_cache()
    assert records.read("d") == 1 and records.lines("j") == []


@pytest.mark.parametrize("place", ["../cabc.so", "/tmp/x.so", "ab/x.so", f"ab/c{'a' * 51}.py", f"ab/c{'a' * 51}.so/x"])
def test_a_library_cannot_leave_inductors_directory(place: str, other_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(other_directory / "inductor"))
    disk_cache.write("library-0", disk_cache.Entry(b"code", {"place": place}))
    disk_cache.write("libraries-0", disk_cache.Entry(b"", {"libraries": ["library-0"]}))
    assert not torch_libraries._restore("libraries-0")
    assert not [path for path in (other_directory / "inductor").rglob("*") if path.is_file()]


def test_libraries_that_are_gone_or_somebody_elses_are_no_failure(
    other_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(other_directory / "inductor"))
    first, second = (f"ab/c{letter * 51}.main.so" for letter in "ab")
    path = other_directory / "inductor" / first
    path.parent.mkdir(parents=True)
    path.write_bytes(b"code")
    torch_libraries._keep("libraries-0", [first, second])
    path.unlink()
    assert torch_libraries._restore("libraries-0") and path.read_bytes() == b"code"
    path.chmod(0o666)
    torch_libraries._keep("libraries-1", [first])
    path.unlink()
    assert torch_libraries._restore("libraries-1") and not path.exists(), "others could have written to it"
