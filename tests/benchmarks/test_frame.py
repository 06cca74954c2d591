"""The benchmark frame: who takes part, that a wrong result has no time, how samples are taken, the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import registry
from benchmarks.__main__ import main
from benchmarks.contenders.csr import CsrLinear
from benchmarks.measure import measure, rounds, speedups
from benchmarks.registry import Contender, Prepared, Problem, Unsupported
from benchmarks.tables import render


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def problem() -> Problem:
    return Problem(nn.Linear(4, 3).eval(), (torch.ones(2, 4),), {"f32": 1e-5})


def running(result: Callable[[Problem], Tensor]) -> Contender:
    return Contender("test", lambda given: Prepared(lambda: result(given)))


DENSE = running(lambda given: given.model(*given.inputs))


def race(**contenders: Contender) -> dict[str, dict[str, Any]]:
    return measure(problem(), contenders, repeats=3, min_sample=1e-6)


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
    outcomes = race(dense=DENSE, wrong=running(lambda given: wrong(given.model(*given.inputs))))
    assert set(outcomes["wrong"]) == {"error"}
    assert why in outcomes["wrong"]["error"]
    assert outcomes["dense"]["median_ms"] > 0


def test_a_result_that_goes_wrong_later_is_an_error_too() -> None:
    calls = count()
    outcomes = race(spoilt=running(lambda given: given.model(*given.inputs) + (next(calls) > 4)))
    assert set(outcomes["spoilt"]) == {"error"}


def test_a_contender_that_raises_does_not_stop_the_others() -> None:
    def crash(given: Problem) -> Prepared:
        raise RuntimeError("no such kernel")

    def refuse(given: Problem) -> Prepared:
        raise Unsupported("needs zeros")

    outcomes = race(crash=Contender("test", crash), refuse=Contender("test", refuse), dense=DENSE)
    assert outcomes["crash"] == {"error": "RuntimeError: no such kernel"}
    assert outcomes["refuse"] == {"skipped": "needs zeros"}
    assert outcomes["dense"]["samples"] == 3


def test_rounds_take_turns_and_fill_the_shortest_sample() -> None:
    now = [0.0]
    calls: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds
            calls.append(name)

        return run

    found = rounds({"a": call("a", 1e-3), "b": call("b", 5e-3)}, 4, 2e-3, clock=lambda: now[0])
    calibration, turns = ["aaaa", "b"], ["aaab", "baaa", "aaab", "baaa"]
    assert "".join(calls) == "".join(calibration + turns)
    assert (found["a"]["inner"], found["b"]["inner"]) == (3, 1)
    assert found["a"]["median_ms"] == pytest.approx(1) and found["b"]["median_ms"] == pytest.approx(5)


def test_speedups_are_over_the_baselines_that_have_a_time() -> None:
    outcomes: dict[str, Any] = {
        "dense": {"median_ms": 6.0},
        "sparse": {"median_ms": 2.0},
        "csr": {"error": "no"},
    }
    speedups(outcomes)
    assert outcomes["sparse"]["speedup"] == {"dense": 3.0}
    assert outcomes["csr"] == {"error": "no"}


@pytest.mark.parametrize("leading", [(1,), (3,), (9,), (2, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_csr_linear_is_the_linear(leading: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(16, 12, bias=bias)
    x = torch.randn(*leading, 16)
    with torch.no_grad():
        linear.weight[torch.rand(12, 16) < 0.8] = 0
        torch.testing.assert_close(CsrLinear(linear)(x), linear(x))


def test_command_line_measures_and_writes_what_tables_read(tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    small = ["--shapes", "16x8", "--sparsity", ".5", "--tokens", "1,4", "--repeats", "2"]
    code = main(["--workload", "linear", "--contender", "dense,csr", *small, "--out", str(out)])
    report = json.loads(out.read_text())
    assert code == 0
    assert [case["name"] for case in report["cases"]] == ["16x8 50% 1 token", "16x8 50% 4 tokens"]
    assert report["cases"][0]["parameters"] == {"shape": "16x8", "sparsity": 0.5, "tokens": 1}
    assert {"cpu", "features", "cores"} <= set(report["machine"]) and "torch" in report["versions"]
    assert {"median_ms", "min_ms", "iqr_ms", "inner", "compile_s"} <= set(report["cases"][0]["results"]["csr"])
    assert "| 16x8 50% 4 tokens" in render(report)


def test_command_line_refuses_unknown_contenders(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--workload", "linear", "--contender", "tpu", "--out", "x.json"])
    assert "unknown contender tpu; there are dense" in capsys.readouterr().err


def report() -> dict[str, Any]:
    def case(tokens: int, threads: int, **results: Any) -> dict[str, Any]:
        parameters = {"tokens": tokens}
        return {
            "workload": "linear",
            "name": f"{tokens} tokens",
            "parameters": parameters,
            "threads": threads,
            "results": results,
        }

    f32 = {"precision": "f32", "skipped": None}
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "Some CPU", "features": ["avx2"], "cores": 4},
        "versions": {"torch": "2.13.0"},
        "settings": {"repeats": 20},
        "contenders": {
            "bf16": {"label": "Half", "precision": "bf16", "skipped": None},
            "dense": {"label": "Dense", **f32},
            "sparse": {"label": "Sparse", **f32},
            "peer": {"label": "Peer", "precision": "f32", "skipped": "not installed"},
        },
        "cases": [
            case(8, 1, dense={"median_ms": 12.0}, sparse={"median_ms": 3.0}, bf16={"median_ms": 0.5}),
            case(32, 1, dense={"median_ms": 40.0}, sparse={"median_ms": 2.5, "cores_elsewhere": 1.0}),
            case(32, 2, dense={"median_ms": 20.0}, sparse={"error": "wrong result"}),
        ],
    }


def test_table_of_a_report() -> None:
    assert (
        render(report())
        == """\
**linear, 1 thread**: ms (speed-up over Dense)

| case | Dense | Sparse | *Half* |
| --- | --: | --: | --: |
| 8 tokens | 12.0 | **3.00 (4.00x)** | 0.500 (24.00x) |
| 32 tokens † | 40.0 | **2.50 (16.00x)** | - |
| geometric mean |  | 8.00x | 24.00x (1 of 2) |

**linear, 2 threads**: ms (speed-up over Dense)

| case | Dense |
| --- | --: |
| 32 tokens | 20.0 |

*Italic*: another precision. Bold: the fastest in float32.

†: other processes were running; the figures are not to be trusted.

Without a time:

- peer: not installed
- 32 tokens, 2T, sparse: wrong result

Medians of 20 interleaved samples. Some CPU, 4 cores (avx2); torch 2.13.0; 2026-01-02.
"""
    )


def test_table_of_chosen_cases() -> None:
    text = render(report(), where={"tokens": "32", "threads": "1"})
    assert "| 32 tokens † |" in text and "| 8 tokens |" not in text and "2 threads" not in text
    with pytest.raises(ValueError, match="no case of the report has"):
        render(report(), where={"tokens": "7"})
