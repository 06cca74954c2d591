"""`python -m gossamer`: the facts that an issue needs, and a test of the installation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gossamer import __main__ as doctor
from gossamer.dialects.errors import GossamerError
from gossamer.dialects.settings import SETTINGS


@pytest.fixture(autouse=True)
def no_cpp_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.compile_module.has_cpp_compiler", lambda: False)  # which takes its time
    torch._dynamo.reset()


def test_it_prints_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    (tmp_path / "k.o").write_bytes(bytes(1_200_000))
    command = [sys.executable, "-m", "gossamer", "--no-self-test"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert f"{tmp_path}, 1 files, 1.2 MB" in run.stdout
    assert [name for name in (*doctor.FACTS, *(each.name for each in SETTINGS)) if f"\n{name} " not in f"\n{run.stdout}"] == []


def test_the_self_test_makes_two_layers_sparse_without_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    before = torch.get_rng_state()
    assert re.fullmatch(
        r"passed in [\d.]+ s: 2 sparse layers \(.+\), largest relative difference \d\.\de-\d\d", doctor.self_test()
    )
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_stays_dense_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.backend.weights.plan.judge", lambda *_: ("there is no kernel", None))
    with pytest.raises(GossamerError, match=r"did not become sparse .*there is no kernel"):
        doctor.self_test()


def test_other_results_than_dense_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CLOSE", -1.0)
    with pytest.raises(GossamerError, match=r"results of sparse and dense layers differ by"):
        doctor.self_test()


def test_one_broken_fact_hides_no_other_and_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise ImportError("no module named llvmlite")

    monkeypatch.setitem(doctor.FACTS, "compilers", broken)
    assert doctor.main(["--no-self-test"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^compilers +FAILED, ImportError: no module named llvmlite$", printed, re.MULTILINE)
    assert re.search(r"^cache ", printed, re.MULTILINE)
