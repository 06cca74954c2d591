"""What was measured corrects predictions that were far off; times are given, not taken."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gossamer
from gossamer.backend.devices import calibrated
from gossamer.backend.devices.measured_times import DENSE, Times
from gossamer.backend.measuring.correct import correct, corrected
from gossamer.backend.measuring.tuning_db import Key
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.cost_model import predict
from gossamer.passes.schedules.families import FAMILIES
from gossamer.passes.schedules.machine_speed import Curve, Machine, Speed
from tests.backend.harness import prune_

MATRIX = Matrix(1024, 1024, 1, "f32", 512, 0.1)
DENSE_SPEED = Machine.usual(512).speeds["f32"].dense
SPEEDS = {name: Curve(((1, 3e3), (64, 3e3))) for name in FAMILIES}
USUAL = Machine.usual(512).with_speed("f32", Speed(DENSE_SPEED, SPEEDS, SPEEDS))
Measured = list[tuple[Key, int, Times]]


def predicted(machine: Machine, matrix: Matrix = MATRIX, tokens: int = 64, threads: int = 1) -> dict[str, float]:
    found = predict(matrix, tokens, threads, machine)
    return {DENSE: found.dense_us} | {name: us - machine.call_us for name, us in found.by_schedule}


def measured(threads: int = 1, matrix: Matrix = MATRIX, tokens: int = 64, **slower: float) -> Measured:
    """Times that are some times what was predicted."""
    us = predicted(USUAL, matrix, tokens, threads)
    return [(Key(matrix, 64, threads), tokens, Times({name: us[name] * factor for name, factor in slower.items()}))]


@pytest.mark.parametrize("factor", [1 / 1.4, 1.0, 1.4])
def test_what_was_about_right_stays(factor: float) -> None:
    assert corrected(USUAL, measured(dense=factor, broadcast=factor)) is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", [DENSE, "broadcast"])
@pytest.mark.parametrize("factor", [1 / 1.8, 1.6, 3.0])
def test_what_was_wrong_is_right_afterwards(name: str, factor: float, threads: int) -> None:
    found = corrected(USUAL, measured(threads, **{name: factor}))
    assert found is not None
    before, after = predicted(USUAL, threads=threads), predicted(found, threads=threads)
    assert 1 / 1.5 < factor * before[name] / after[name] < 1.5
    for other in before.keys() - {name}:
        assert after[other] == pytest.approx(before[other])


def test_only_numbers_of_tokens_near_by_are_corrected() -> None:
    found = corrected(USUAL, measured(dense=2.0))
    assert found is not None
    assert predicted(found, tokens=8)[DENSE] == pytest.approx(predicted(USUAL, tokens=8)[DENSE])


def test_one_measurement_changes_a_speed_by_four_at_most() -> None:
    found = corrected(USUAL, measured(broadcast=100.0))
    assert found is not None and predicted(found)["broadcast"] == pytest.approx(4 * predicted(USUAL)["broadcast"])


def test_products_that_disagree_meet_in_the_middle() -> None:
    other = replace(MATRIX, rows=1536)
    assert corrected(USUAL, measured(broadcast=2.0) + measured(matrix=other, broadcast=0.5)) is None


def test_calls_are_no_products() -> None:
    tiny = replace(MATRIX, rows=16, columns=16)
    assert corrected(USUAL, measured(matrix=tiny, tokens=1, dense=50.0, rowpairs=50.0)) is None


def test_numbers_of_tokens_between_classes_are_not_errors() -> None:
    assert corrected(USUAL, measured(tokens=33, dense=1.0, broadcast=1.0)) is None


def test_much_sparser_weights_tell_of_dense_products_alone() -> None:
    sparser = replace(MATRIX, density=0.05)
    assert corrected(USUAL, measured(matrix=sparser, broadcast=0.5, rowpairs=3.0)) is None
    assert corrected(USUAL, measured(matrix=sparser, dense=3.0)) is not None


def test_of_types_that_nobody_calibrated_nothing_is_learned() -> None:
    assert corrected(Machine.usual(512), measured(broadcast=3.0)) is None


def test_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    calibrated.keep(USUAL)
    correct(measured(broadcast=3.0))
    calibrated.forget()
    assert predicted(calibrated.this_machine())["broadcast"] == pytest.approx(3 * predicted(USUAL)["broadcast"], rel=0.1)


def test_later_compilations_predict_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose kernels were measured to be slow teaches that another like it stays dense, without being measured."""
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    calibrated.keep(USUAL)
    monkeypatch.setattr("gossamer.backend.devices.cpu.this_machine", calibrated.this_machine)

    def slow(calls: Mapping[str, Callable[[], object]], threads: int) -> dict[str, float]:
        us = predicted(calibrated.this_machine(), tokens=16, threads=threads)
        return {name: us[name] * (1.0 if name == DENSE else 20.0) for name in calls if name in us}

    monkeypatch.setattr("gossamer.backend.measuring.tune.fastest", slow)

    def gain(rows: int, mode: str) -> float:
        with torch.no_grad():
            model = prune_(nn.Linear(1024, rows), 0.1).eval()
            (decision,) = gossamer.explain(model, torch.randn(16, 1024), mode=mode, options={"dense": "eager"}).decisions
        assert decision.gain is not None
        return decision.gain

    before = gain(1536, "default")
    gain(1024, "max-autotune")
    assert gain(1536, "default") < before / 1.5
