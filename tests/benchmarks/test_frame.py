"""The benchmark frame: who takes part, that a wrong result has no time, how samples are taken, going on after a break."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import registry
from benchmarks.__main__ import main
from benchmarks.measure import race, rounds, speedups
from benchmarks.models import PrunedModel
from benchmarks.registry import Contender, Outcome, Prepared, Settings, Unsupported
from benchmarks.roofline import peaks, placed
from benchmarks.tables import render


def problem() -> PrunedModel:
    return PrunedModel(nn.Linear(4, 3).eval(), (torch.ones(2, 4),), {"f32": 1e-5})


def running(result: Callable[[PrunedModel], Tensor]) -> Contender:
    return Contender("test", lambda given: Prepared(lambda: result(given)))


DENSE = running(lambda given: given.model(*given.inputs))


def outcomes(**contenders: Contender) -> dict[str, Outcome]:
    return race(problem(), contenders, settings=Settings(3, 1e-6))


def test_plugins_are_the_files_of_their_folder() -> None:
    assert {"dense", "inductor", "inductor-bf16", "csr", "sparse"} <= set(registry.names("contenders"))
    assert {"linear", "minilm"} <= set(registry.names("workloads"))
    assert registry.contender("inductor-bf16").precision == "bf16"


def test_unknown_plugin_is_named_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"no 'tpu' among the contenders: .*dense"):
        registry.contender("tpu")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda y: y + 1, "relative error"),
        (lambda y: y * float("nan"), "relative error nan"),
        (lambda y: y[:1], "shape (1, 3), not (2, 3)"),
    ],
)
def test_a_wrong_result_is_an_error_and_never_a_time(wrong: Callable[[Tensor], Tensor], why: str) -> None:
    found = outcomes(dense=DENSE, wrong=running(lambda given: wrong(given.model(*given.inputs))))
    assert set(found["wrong"]) == {"error"}
    assert why in found["wrong"]["error"]
    assert found["dense"]["median_ms"] > 0


def test_a_result_that_goes_wrong_later_is_an_error_too() -> None:
    calls = count()
    found = outcomes(spoilt=running(lambda given: given.model(*given.inputs) + (next(calls) > 4)))
    assert set(found["spoilt"]) == {"error"}


def test_a_contender_that_raises_does_not_stop_the_others() -> None:
    def crash(given: PrunedModel) -> Prepared:
        try:
            raise LookupError("no such kernel")
        except LookupError as error:
            raise RuntimeError("the backend failed") from error

    def refuse(given: PrunedModel) -> Prepared:
        raise Unsupported("needs zeros")

    found = outcomes(crash=Contender("test", crash), refuse=Contender("test", refuse), dense=DENSE)
    assert found["crash"] == {"error": "LookupError: no such kernel"}
    assert found["refuse"] == {"skipped": "needs zeros"}
    assert found["dense"]["samples"] == 3


class Clock:
    """Time that passes only in calls, which it notes."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, ""

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.calls += name

        return run


def test_rounds_take_turns_and_fill_the_shortest_sample() -> None:
    clock = Clock()
    calls = {"a": clock.call("a", 1e-3), "b": clock.call("b", 5e-3), "c": clock.call("c", 3e-2)}
    found = rounds(calls, Settings(3, 2e-3), clock=lambda: clock.now)
    calibration, samples = "aaaaaaa" + "bb" + "cc", {"a": 13 * "a", "b": 3 * "b", "c": "c"}  # after 10 ms that are not timed
    assert clock.calls == calibration + "".join(samples[name] for turn in ("abc", "bca", "cab") for name in turn)
    assert [found[name]["inner"] for name in calls] == [3, 1, 1]
    assert [found[name]["median_ms"] for name in calls] == pytest.approx([1, 5, 30])


def test_slow_calls_take_part_in_fewer_rounds_but_in_five() -> None:
    clock = Clock()
    calls = {name: clock.call(name, seconds) for name, seconds in (("a", 0.09), ("b", 0.19), ("c", 30.0))}
    found = rounds(calls, Settings(20, 1e-3, seconds=2.0), clock=lambda: clock.now)
    assert [found[name]["samples"] for name in calls] == [20, 10, 5]


def test_contenders_with_threads_of_their_own_come_last_in_a_round() -> None:
    clock = Clock()
    calls = {name: clock.call(name, 3e-2) for name in "abc"}  # long ones
    rounds(calls, Settings(3, 1e-3), apart={"b"}, clock=lambda: clock.now)
    assert clock.calls == "aabbcc" + "acbcabacb"


def test_what_one_call_makes_ready_for_the_later_ones_does_not_decide_how_many_make_a_sample() -> None:
    clock, slow = Clock(), iter([True])
    first, later = clock.call("a", 1.0), clock.call("b", 1e-3)
    found = rounds({"a": lambda: (first if next(slow, False) else later)()}, Settings(4, 2e-3), clock=lambda: clock.now)
    assert found["a"]["inner"] == 3


def test_speedups_are_over_the_baselines_that_have_a_time() -> None:
    found: dict[str, Any] = {"dense": {"median_ms": 6.0}, "sparse": {"median_ms": 2.0}, "csr": {"error": "no"}}
    speedups(found)
    assert found["sparse"]["speedup"] == {"dense": 3.0}
    assert found["csr"] == {"error": "no"}


def test_the_work_of_a_model_is_that_of_its_linears() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5, bias=False)).eval()
    with torch.no_grad():
        model[0].weight[0] = 0
        result, work = PrunedModel(model, (torch.ones(2, 4),), {}).reference()
    assert result.dtype == torch.float64
    assert (work.flops, work.nonzero_flops) == (2 * 2 * (12 + 15), 2 * 2 * (8 + 15))
    assert (work.weights, work.activations) == (4 * (15 + 15), 4 * 2 * (4 + 3 + 3 + 5))


def test_the_roof_is_the_peak_or_the_bandwidth_where_the_bytes_lie() -> None:
    levels = {"l2": {"bytes": 100, "copy_gbytes_s": 10.0}, "dram": {"bytes": None, "copy_gbytes_s": 1.0}}
    machine = {"f32_gflops": 50.0, "levels": levels}
    _, work = problem().reference()
    near, far = placed(1.0, work, 10, "f32", machine), placed(1.0, work, 90, "f32", machine)
    assert near["intensity"] == pytest.approx(48 / (10 + 56)) and near["roof_gflops"] == pytest.approx(480 / 66)
    assert far["roof_gflops"] == pytest.approx(48 / (90 + 56))
    assert near["useful_gflops"] == pytest.approx(48e-6)


def test_peaks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.roofline.cache_sizes", lambda: {"l2": 1 << 16, "l3": 1 << 20})
    monkeypatch.setattr("benchmarks.roofline._MINIMUM_OF", 1)
    found = peaks(1)
    assert found["f32_gflops"] > 0 and found["bf16_gflops"] > 0
    assert [level["copy_gbytes_s"] > 0 for level in found["levels"].values()] == [True] * 3


@pytest.fixture
def no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {"dram": {"bytes": None, "copy_gbytes_s": 1.0}}
    monkeypatch.setattr("benchmarks.__main__.peaks", lambda threads: {"f32_gflops": 1.0, "bf16_gflops": 1.0, "levels": levels})


SMALL = ["--shapes", "16x8", "--sparsity", ".5", "--repeats", "2"]


@pytest.mark.usefixtures("no_peaks")
def test_command_line_measures_and_writes_what_tables_read(tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    small = [*SMALL, "--tokens", "1,4", "--contender", "dense,csr"]
    code = main(["--workload", "linear", *small, "--out", str(out)])
    report = json.loads(out.read_text())
    assert code == 0
    assert [case["name"] for case in report["cases"]] == ["16x8 50% 1 token", "16x8 50% 4 tokens"]
    assert report["cases"][0]["parameters"] == {"shape": "16x8", "pattern": "unstructured", "sparsity": 0.5, "tokens": 1}
    assert {"cpu", "features", "cores"} <= set(report["machine"]) and "torch" in report["versions"]
    assert set(report["cases"][0]["results"]["csr"]) == {"median_ms", "iqr_ms", "samples"}
    assert len(out.read_text().splitlines()) == 12  # one for each case
    assert "| 16x8 50% 4 tokens" in render(report)


@pytest.mark.usefixtures("no_peaks")
def test_a_run_that_was_broken_off_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    command = ["--workload", "linear", *SMALL, "--contender", "dense", "--out", str(out)]
    main([*command, "--tokens", "1"])
    before = json.loads(out.read_text())
    main([*command, "--tokens", "1,2", "--resume"])
    after = json.loads(out.read_text())
    assert after["cases"][0] == before["cases"][0]
    after["cases"][0]["results"]["dense"] = {"error": "out of memory"}
    out.write_text(json.dumps(after))
    main([*command, "--tokens", "1,2", "--resume"])
    again = json.loads(out.read_text())
    assert [case["parameters"]["tokens"] for case in again["cases"]] == [2, 1]
    assert again["cases"][0] == after["cases"][1] and "median_ms" in again["cases"][1]["results"]["dense"]
    assert [case["parameters"]["tokens"] for case in after["cases"]] == [1, 2]
    with pytest.raises(SystemExit, match="cannot be resumed, its settings differ"):
        main([*command, "--tokens", "1", "--resume", "--min-sample-ms", "3"])


def test_command_line_refuses_unknown_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--workload", "linear", "--contender", "tpu", "--out", "x.json"])
    assert "unknown contender tpu; there are dense" in capsys.readouterr().err


@pytest.mark.parametrize("name", registry.names("workloads"))
def test_every_workload_lists_its_cases_and_how_long_they_take(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", name, "--list"]) == 0
    *cases, duration = capsys.readouterr().out.splitlines()
    assert cases and len(set(cases)) == len(cases)
    assert duration.startswith(f"{len(cases)} case")
