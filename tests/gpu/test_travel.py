"""What travels to a machine with a GPU: the plan, its time limits, and what becomes of the timings."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import fit, run_all, travel
from benchmarks.gpu.cases import Layer, timed
from benchmarks.gpu.run_all import Step
from benchmarks.gpu.timings import by_weight
from gossamer.backend.devices.cuda_cost import EXPECTED, Rates, Roofline
from gossamer.runtime.ptx import Architecture

PEAKS = ((9, 0), 132 * 1980.0, 4.8e6)
TRUE = Rates(dense=0.55, read=0.7, kernel_us=2.2, cycles={"gpu-kblock": 1.8, "gpu-expand": 0.9})


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without archives: one step takes the place of the real ones."""
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "UNPACKED", tmp_path)
    return tmp_path


def _step(script: str, seconds: int = 20, **more: str) -> Step:
    return Step("one", seconds, (sys.executable, "-c", script), **more)


def test_the_plan_takes_nine_minutes_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all.main(["--dry-run"]) == 0
    assert sum(step.seconds for step in run_all.STEPS) <= 9 * 60
    shown = capsys.readouterr().out
    assert all(step.name in shown for step in run_all.STEPS)


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_all.main(["--dry-run", "--only", "chekcs"])
    assert "no step is called chekcs; there are checks, sanitizer" in capsys.readouterr().err


def test_a_step_that_ends_is_done(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "STEPS", (_step("print('seen')"),))
    out = unpacked / "results"
    assert run_all.main(["--out", str(out)]) == 0
    steps = json.loads((out / "plan.json").read_text())["steps"]
    assert [step["status"] for step in steps] == ["done", "done"]
    assert "seen" in (out / "log.txt").read_text()


def test_a_step_that_takes_too_long_is_cut_and_keeps_its_results(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = unpacked / "results"
    script = f"import time; open({str(out / 'kept')!r}, 'w').write('one'); time.sleep(60)"
    monkeypatch.setattr(run_all, "STEPS", (_step(script, 5), _step("print('after')")))
    assert run_all.main(["--out", str(out)]) == 1
    steps = json.loads((out / "plan.json").read_text())["steps"]
    assert [step["status"] for step in steps] == ["done", "cut", "done"]
    assert (out / "kept").read_text() == "one"


def test_a_step_without_its_tool_is_skipped(unpacked: Path) -> None:
    record = run_all.run(_step("raise SystemExit(1)", tool="no-such-tool"), unpacked)
    assert record["status"] == "skipped"
    assert record["reason"] == "there is no no-such-tool"


def test_archives_are_unpacked_once_and_again_if_they_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "UNPACKED", tmp_path / "unpacked")
    (tmp_path / "packed/site").mkdir(parents=True)
    (tmp_path / "packed/torch_mlir").mkdir()
    file, found = tmp_path / "packed/site/a.py", tmp_path / "unpacked/site/a.py"
    travel.archive(tmp_path / "torch_mlir-1.0+2-cp312.tar.xz", tmp_path / "packed/torch_mlir", 0)
    for text in "12":
        file.write_text(text)
        travel.archive(tmp_path / "site.tar.xz", tmp_path / "packed/site", 0)
        run_all.unpack()
        assert found.read_text() == text
    found.write_text("kept")
    run_all.unpack()
    assert found.read_text() == "kept"
    assert (tmp_path / "unpacked/torch_mlir").is_dir()


def test_torch_mlir_is_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = list[str]()
    monkeypatch.setattr(travel.bundle, "write", lambda folder, *_: folder.mkdir())
    monkeypatch.setattr(travel, "_torch_mlir", lambda folder, python: (folder.mkdir(), packed.append(python)))
    folder = tmp_path / "travel"
    for _ in range(2):
        travel.write(folder, "3.12", 0, Architecture(90))
        (folder / "old").mkdir()
    travel.write(folder, "3.11", 0, Architecture(90))
    assert packed == ["3.12", "3.11"]
    names = {path.name.partition("-")[0] for path in folder.iterdir()}
    assert names == {"torch_mlir", "bundle.tar.xz", "site.tar.xz", "run_all.py", "run_all.sh"}


def test_what_is_too_large_to_travel_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"123")
    assert "file" in travel.sizes(tmp_path)
    monkeypatch.setattr(travel, "_MOST", 2)
    with pytest.raises(ValueError, match="leave out more"):
        travel.sizes(tmp_path)


def test_the_site_is_found_as_if_it_were_installed(tmp_path: Path) -> None:
    travel.ours(tmp_path)
    script = "import gossamer, gossamer.backend, torch; print(gossamer.__file__, torch._dynamo.list_backends())"
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, *{sys.path!r}]; {script}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith(str(tmp_path))
    assert "'sparse'" in done.stdout


def test_timings_begin_with_some_of_each_kind() -> None:
    weights = by_weight(timed())
    kinds = {(layer.schedule, layer.element) for (layer, _), _ in weights}
    first = {(layer.schedule, layer.element) for (layer, _), _ in weights[: len(kinds)]}
    assert first == kinds
    assert sum(len(counts) for _, counts in weights) == len(list(timed()))


@pytest.fixture
def timings(tmp_path: Path) -> Path:
    """As a GPU would give them whose rates are TRUE, within a tenth."""
    draw, model = random.Random(0), Roofline.with_peaks(*PEAKS, TRUE)
    lines = [{"capability": PEAKS[0], "multiprocessors": 132, "clock_mhz": 1980.0, "bytes_a_us": PEAKS[2]}]
    for schedule, element in (("gpu-kblock", "f32"), ("gpu-expand", "bf16"), ("gpu-deltas", "f16")):
        for rows, columns in ((768, 3072), (4096, 4096)):
            for density in (0.3, 0.1):
                for tokens in (1, 16, 64, 2048):
                    layer = Layer(schedule, rows, columns, element)
                    matrix = fit.matrix(layer, density)
                    noise = lambda: draw.uniform(0.95, 1.05)
                    times = {
                        "gossamer": model.sparse_us(schedule, matrix, tokens) * noise(),
                        "cublas": model.dense_us(matrix, tokens, False) * noise(),
                        "cusparse": model.sparse_us(schedule, matrix, tokens) / 2,
                    }
                    record = {"layer": layer.as_json(), "density": density, "tokens": tokens, "microseconds": times}
                    lines.append(record | {"nonzeros": int(rows * columns * density)})
    file = tmp_path / "timings.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


def test_the_rates_of_a_gpu_are_found_from_its_times(timings: Path, tmp_path: Path) -> None:
    assert fit.main([str(timings), "--out", str(tmp_path / "fit.json")]) == 0
    found = json.loads((tmp_path / "fit.json").read_text())
    for name in ("dense", "read", "kernel_us"):
        assert found["fitted"][name] == pytest.approx(getattr(TRUE, name), rel=0.15)
    assert found["fitted"]["cycles"]["gpu-kblock"] == pytest.approx(1.8, rel=0.15)
    before, after = (max(each["median factor"] for each in found[name].values()) for name in ("errors before", "errors after"))
    assert after < 1.1 < before
    assert found["expected"]["dense"] == EXPECTED.dense
    assert found["another kernel is much faster"]


def test_tables_have_a_row_for_each_layer_and_density(timings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main([str(timings), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| layer | zeros | 1 tokens | 16 tokens | 64 tokens | 2048 tokens |"
    assert len(lines) == 2 + 3 * 2 * 2


def test_without_timings_there_is_no_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text('{"capability": [9, 0]}\n')
    assert fit.main([str(tmp_path / "empty.jsonl")]) == 1
    assert "has no timings of layers" in capsys.readouterr().err
