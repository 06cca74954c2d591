"""mode="max-autotune": what is measured, what is remembered, and that decisions follow the measurement, not the prediction.

Times are given, not taken.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.devices import calibrated
from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.measured_times import DENSE
from gossamer.backend.measuring import calibrate
from gossamer.backend.measuring.tune import tuned
from gossamer.backend.report.table import Report
from gossamer.passes.schedules import cost_model
from gossamer.passes.schedules.families import FAMILIES
from gossamer.passes.schedules.machine_speed import Machine
from gossamer.runtime.target import host
from tests.backend.harness import assert_same, compile_and_run, prune_

Times = Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, predictions of vectors of 512 bits without a calibration, and two families to choose from.

    These are "broadcast", and "rowpairs" as if it were for three tokens at most and not for chains.
    """
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    usual = replace(Machine.usual(512), measured=frozenset(calibrate._TYPES))
    monkeypatch.setattr(calibrated, "this_machine", lambda: usual)
    monkeypatch.setattr("gossamer.backend.devices.cpu.this_machine", lambda: usual)
    predict = lambda matrix, *given: cost_model.predict(replace(matrix, bits=512), *given)
    for place in ("devices.cpu._predict", "measuring.tune.predict"):
        monkeypatch.setattr(f"gossamer.backend.{place}", predict)
    cycles = lambda *given: 1.2 * FAMILIES["broadcast"].cycles(*given)
    few = replace(FAMILIES["rowpairs"], most=3, cycles=cycles, chain=None)
    for place in ("schedules.cost_model", "chains.products"):
        monkeypatch.setattr(f"gossamer.passes.{place}.FAMILIES", {"broadcast": FAMILIES["broadcast"], "rowpairs": few})
    return tmp_path


class Stopwatch:
    """Stands for the measurement: notes the contenders, and gives each its time (100 us by default)."""

    def __init__(self, **us: float) -> None:
        self.us, self.asked = us, []  # type: ignore[var-annotated]

    def __call__(self, calls: Mapping[str, Callable[[], object]], threads: int) -> dict[str, float]:
        self.asked.append(sorted(calls))
        for call in calls.values():
            call()
        return {name: self.us.get(name, 100.0) for name in calls}


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopwatch]:
    found = Stopwatch(dense=700.0)
    monkeypatch.setattr("gossamer.backend.measuring.tune.fastest", found)
    yield found


def layer(rows: int = 1024, columns: int = 1024, density: float = 0.1) -> nn.Module:
    return prune_(nn.Linear(columns, rows), density).eval()


def explained(model: nn.Module, tokens: int = 2, mode: str = "max-autotune", **options: Any) -> Report:
    with torch.no_grad():
        return gossamer.explain(model, torch.randn(tokens, 1024), mode=mode, options={"dense": "eager", **options})


def test_the_fastest_of_the_measured_is_taken(stopwatch: Stopwatch) -> None:
    for winner in ("rowpairs", "broadcast"):
        stopwatch.us = {DENSE: 70.0, winner: 10.0}
        (decision,) = explained(layer(1024 if winner == "rowpairs" else 3000)).decisions
        assert decision.sparse and decision.schedule == winner and decision.measured
        assert decision.gain == pytest.approx(70 / (10 + Machine.usual(512).call_us))
        assert decision.reason.startswith("1 op fused; measured: ") and f"{winner} 10 us" in decision.reason
    assert all(DENSE in asked and {"rowpairs", "broadcast"} <= set(asked) for asked in stopwatch.asked)


@pytest.mark.parametrize("broadcast", [11.0, 90.0])
def test_few_tokens_go_through_a_chain_by_the_schedules_that_were_measured_to_be_fastest(
    stopwatch: Stopwatch, broadcast: float
) -> None:
    """One product after the other; of these two only broadcast runs on the tiles of longer chains, so it is measured, too."""
    stopwatch.us = {DENSE: 70.0, "rowpairs": 10.0, "broadcast": broadcast}
    found = explained(nn.Sequential(layer(2048), layer(1024, 2048)), tokens=1).decisions
    assert all(asked == ["broadcast", DENSE, "rowpairs"] for asked in stopwatch.asked)
    assert [(d.measured, d.schedule, "in a chain of 2" in d.reason) for d in found] == [(True, "rowpairs", True)] * 2


def test_dense_is_taken_where_it_is_the_fastest(stopwatch: Stopwatch) -> None:
    stopwatch.us = {DENSE: 70.0}
    (decision,) = explained(layer()).decisions
    assert not decision.sparse and decision.measured and decision.gain is not None and decision.gain < 1
    assert "dense 70 us" in decision.reason
    assert str(decision).endswith("measured 0.67x of dense")


def test_without_the_mode_nothing_is_measured(stopwatch: Stopwatch) -> None:
    (decision,) = explained(layer(), mode="default").decisions
    assert stopwatch.asked == [] and not decision.measured


@pytest.mark.parametrize("given", [{"mode": "max-autotune-no-cudagraphs"}, {"mode": "default", "max_autotune": True}])
def test_other_ways_to_ask_for_it(stopwatch: Stopwatch, given: dict[str, Any]) -> None:
    (decision,) = explained(layer(), **given).decisions
    assert decision.measured and len(stopwatch.asked) == 1


def test_the_second_time_nothing_is_measured(stopwatch: Stopwatch) -> None:
    torch.manual_seed(0)
    model = layer()
    first = explained(model)
    second = explained(model)
    assert len(stopwatch.asked) == 1 and first.decisions == second.decisions


def test_equal_layers_are_measured_once(stopwatch: Stopwatch) -> None:
    model = nn.Sequential(*(layer() for _ in range(3)))
    with torch.no_grad():  # the same number of nonzeros in each row, so that all are of one class
        for linear in model:
            weight = torch.randn(1024, 1024)
            weight[torch.rand(1024, 1024).argsort(1) >= 102] = 0
            linear.weight.copy_(weight)  # type: ignore[union-attr, operator]
    report = explained(model)
    assert len(stopwatch.asked) == 1 and [d.measured for d in report.decisions] == [True] * 3


def test_a_similar_layer_borrows_the_times(stopwatch: Stopwatch) -> None:
    stopwatch.us = {DENSE: 70.0, "rowpairs": 10.0}
    explained(layer())
    (decision,) = explained(layer(1300)).decisions
    assert len(stopwatch.asked) == 1
    assert decision.measured and decision.schedule == "rowpairs" and "measured on 1024x1024 at 10%" in decision.reason


@pytest.mark.parametrize("other", [{"rows": 3000}, {"density": 0.3}])
def test_another_layer_is_measured(stopwatch: Stopwatch, other: dict[str, Any]) -> None:
    explained(layer(), 64)
    explained(layer(**other), 64)
    assert len(stopwatch.asked) == 2


def test_other_numbers_of_tokens_are_measured(stopwatch: Stopwatch) -> None:
    model = layer()
    for tokens in (1, 2, 100, 128, 100):
        explained(model, tokens)
    assert len(stopwatch.asked) == 3


def test_a_gain_far_above_its_prediction_is_not_believed(stopwatch: Stopwatch) -> None:
    stopwatch.us["dense"] = 1e6  # its threads wait for a core that another process has
    predicted = explained(nn.Sequential(layer()), mode="default").decisions
    for _ in range(2):  # nor kept
        found = explained(nn.Sequential(layer())).decisions
        assert [decision.gain for decision in found] == pytest.approx([decision.gain for decision in predicted], rel=0.01)
    assert len(stopwatch.asked) == 2
    stopwatch.us["dense"] = 700.0
    assert explained(nn.Sequential(layer())).decisions[0].gain == pytest.approx(7, rel=0.1)


def test_a_close_race_is_not_taken_over(stopwatch: Stopwatch) -> None:
    stopwatch.us = {DENSE: 70.0, "rowpairs": 10.0, "broadcast": 10.5}
    explained(layer())
    explained(layer(1300))
    assert len(stopwatch.asked) == 2


def test_hopeless_layers_are_not_measured(stopwatch: Stopwatch) -> None:
    (decision,) = explained(layer(density=0.95)).decisions
    assert stopwatch.asked == [] and not decision.sparse and not decision.measured


def test_a_given_schedule_is_measured_alone(stopwatch: Stopwatch) -> None:
    explained(layer(), schedule="broadcast")
    assert stopwatch.asked == [["broadcast", DENSE]]
    explained(layer())
    assert len(stopwatch.asked) == 2, "what was measured for one schedule does not stand for all"


def test_dynamic_tokens_get_a_schedule_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(calls: Mapping[str, Any], threads: int) -> dict[str, float]:
        tokens = calls[DENSE].args[0].shape[0]
        best = "rowpairs" if tokens <= 1 else "broadcast"
        return {name: 70.0 if name == DENSE else 10.0 if name == best else 100.0 for name in calls}

    monkeypatch.setattr("gossamer.backend.measuring.tune.fastest", measure)
    model, x = layer(), torch.randn(9, 1024)
    run = compile_and_run(model, x, dynamic=True, min_gain=1.1, max_autotune=True)
    assert [d.schedule for d in run.regions] == ["rowpairs, broadcast"]
    for tokens in (9, 3, 2, 70):
        x = torch.randn(tokens, 1024)
        assert_same(run.function(x), model(x).detach())


def test_a_schedule_that_fails_is_left_out(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.backend.measuring import measure
    from gossamer.dialects.errors import CompileError

    kernel_of = measure.kernel_of

    def failing(matrix: Any, dtype: torch.dtype, schedule: str) -> Any:
        if schedule == "rowpairs":
            raise CompileError("no")
        return kernel_of(matrix, dtype, schedule)

    monkeypatch.setattr(measure, "kernel_of", failing)
    (decision,) = explained(layer()).decisions
    assert "rowpairs" not in stopwatch.asked[0] and decision.schedule != "rowpairs"


def test_the_random_numbers_of_the_user_are_left_alone(stopwatch: Stopwatch) -> None:
    model, x = layer(), torch.randn(2, 1024)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    with torch.no_grad():
        gossamer.explain(model, x, mode="max-autotune", options={"dense": "eager"})
    assert torch.equal(torch.rand(1), expected)
    assert stopwatch.asked


def test_the_reference_is_never_measured() -> None:
    from gossamer import Options

    assert tuned([], {}, Options(schedule="reference"), Budget(everything=True)) == []


def test_the_machine_is_calibrated_first(stopwatch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(calibrated, "this_machine", lambda: Machine.usual(host().vector_bits))
    monkeypatch.setattr(calibrate, "calibrate", lambda elements: asked.append(elements))
    explained(layer())
    assert asked == [["f32"]]
