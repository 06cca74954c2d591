"""Calibration: what is measured, what is kept, and that predictions follow it. Times are given, not taken."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import gossamer
from gossamer.backend.devices import calibrated
from gossamer.backend.graph.zero_pattern import Pattern
from gossamer.backend.measuring import calibrate, call_time, first_use
from gossamer.passes.framework.family import Matrix
from gossamer.passes.schedules.families import FAMILIES
from gossamer.runtime.target import host
from tests.backend.harness import prune_
from tests.runtime.damage import NONSENSE, variations

Calls = Mapping[str, Callable[[], object]]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "_ROWS", 96)
    monkeypatch.setattr(calibrate, "_COLUMNS", 64)
    return tmp_path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call takes 50 us; the names of all that were measured."""
    names: list[str] = []

    def fastest(calls: Calls, threads: int, rounds: int = 9) -> dict[str, float]:
        assert threads == 1 == torch.get_num_threads()
        names.extend(calls)
        return dict.fromkeys(calls, 50.0)

    monkeypatch.setattr(calibrate, "fastest", fastest)
    monkeypatch.setattr(calibrate, "call_us", lambda: 4.0)
    return names


def test_a_machine_that_nobody_calibrated_is_the_usual_one() -> None:
    assert calibrated.this_machine().measured == frozenset()


def test_what_was_measured_is_kept(seen: list[str]) -> None:
    found = gossamer.calibrate()
    assert found.measured == {"f32"} == calibrated.this_machine().measured
    assert calibrated.this_machine().to_json() == found.to_json()
    assert {"sum", "dense", "broadcast", "rowpairs"} <= set(seen) <= {"sum", "dense", *FAMILIES}
    assert set(found.speeds["f32"].families) == set(seen) - {"sum", "dense"}


def test_a_call_is_measured_too(seen: list[str]) -> None:
    assert gossamer.calibrate().call_us == calibrated.this_machine().call_us == 4.0


def test_the_call_of_a_region_takes_microseconds() -> None:
    assert 0.1 < call_time.call_us() < 1e4


def test_rates_are_cycles_over_times(seen: list[str]) -> None:
    speed = gossamer.calibrate().speeds["f32"]
    cycles = FAMILIES["broadcast"].cycles(Matrix(96, 64, 1, "f32", host().vector_bits, 0.2), 8)
    assert speed.families["broadcast"].at(8) == pytest.approx(cycles / 50.0)
    cycles = FAMILIES["broadcast"].cycles(Matrix(96, 64, 1, "f32", host().vector_bits, 0.5), 16)
    assert speed.half["broadcast"].at(16) == speed.cycles_a_us("broadcast", 16, 0.5) == pytest.approx(cycles / 50.0)
    assert speed.dense_us(384 * 384, 4, 16) == pytest.approx(50.0)


def test_a_second_element_type_is_added(seen: list[str]) -> None:
    gossamer.calibrate()
    assert gossamer.calibrate(["f64"]).measured == {"f32", "f64"} == calibrated.this_machine().measured


def test_products_of_int8_are_measured_like_those_of_floats(seen: list[str]) -> None:
    found = gossamer.calibrate(["i8"])
    assert set(found.speeds["i8"].families) <= {"quads", "lookup8", "amxexpand", "amxquads"}
    assert "quads" in seen
    calibrated.forget()
    assert calibrated.this_machine().to_json() == found.to_json()


def test_an_unknown_element_type() -> None:
    with pytest.raises(gossamer.OptionError, match="unknown element type 'f8'; there are f32, f64, bf16, f16, i8"):
        gossamer.calibrate(["f8"])
    with pytest.raises(SystemExit, match="unknown element type 'f8'"):
        calibrate.main(["--elements", "f8"])


def test_the_command_line_shows_what_was_measured(seen: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    calibrate.main([])
    shown = capsys.readouterr().out
    assert "dense GF/s 0.6 MB" in shown and "broadcast cycles/us" in shown


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", json.dumps({"name": "x", "read": [[1, 1]], "call_us": 1, "speeds": {"f32": {}}})]
)
def test_a_damaged_record_is_ignored(directory: Path, seen: list[str], content: str) -> None:
    gossamer.calibrate()
    (record,) = directory.glob("machine-*.json")
    record.write_text(content)
    calibrated._recorded.cache_clear()
    assert calibrated.this_machine().measured == frozenset()


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: f"{value!r:.20}")
def test_a_record_without_sense_is_refused_wherever_that_stands(seen: list[str], value: object) -> None:
    machine = gossamer.calibrate()
    whole = json.loads(json.dumps(machine.to_json()))
    assert machine.updated(whole).to_json() == machine.to_json()
    for changed in variations({name: whole[name] for name in ("read", "call_us", "speeds")}, value):
        with pytest.raises(ValueError):
            machine.updated({"name": "x", **changed} if isinstance(changed, dict) else changed)


def test_a_record_without_sense_is_ignored_and_said_so_once(
    directory: Path, seen: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    gossamer.calibrate()
    (record,) = directory.glob("machine-*.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "call_us": math.nan}))
    calibrated._recorded.cache_clear()
    assert all(calibrated.this_machine().measured == frozenset() for _ in range(3))
    assert len([r for r in caplog.records if "has impossible values (nan is no speed)" in r.getMessage()]) == 1


def test_decisions_follow_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prune_(nn.Linear(512, 512), 0.2).eval(), torch.randn(64, 512)
    monkeypatch.setattr("gossamer.backend.devices.cpu.this_machine", calibrated.this_machine)
    for dense_us, sparse in ((1.0, False), (1e6, True)):
        monkeypatch.setattr(
            calibrate, "fastest", lambda calls, *_, us=dense_us: {name: us if name == "dense" else 50.0 for name in calls}
        )
        gossamer.calibrate()
        with torch.no_grad():
            (decision,) = gossamer.explain(model, x, options={"dense": "eager"}).decisions
        assert decision.sparse == sparse


def _compiled(model: nn.Module, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend="sparse", options={"dense": "eager"})(x)


def test_the_first_compilation_of_a_pruned_model_calibrates(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 64)
    _compiled(prune_(nn.Linear(64, 64), 0.2), x)
    assert not seen, "GOSSAMER_CALIBRATE=0 in all tests"
    monkeypatch.delenv("GOSSAMER_CALIBRATE")
    _compiled(nn.Linear(64, 64), x)
    assert not seen, "it has no zeros"
    with monkeypatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE_DIR", "")
        _compiled(prune_(nn.Linear(64, 64), 0.2), x)
    assert not seen, "there is no cache"
    _compiled(prune_(nn.Linear(64, 64), 0.2), x)
    assert "dense" in seen and calibrated.this_machine().measured == {"f32"}
    seen.clear()
    _compiled(prune_(nn.Linear(64, 48), 0.2), x)
    assert not seen, "it is known"


def test_the_first_compilation_of_a_quantized_model_calibrates(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_CALIBRATE")
    _compiled(gossamer.quantize(prune_(nn.Sequential(nn.Linear(64, 64)), 0.2)).eval(), torch.randn(4, 64))
    assert calibrated.this_machine().measured == {"i8"}
    seen.clear()
    _compiled(gossamer.quantize(prune_(nn.Sequential(nn.Linear(64, 48)), 0.2)).eval(), torch.randn(4, 64))
    assert not seen, "it is known"


def test_weights_of_other_classes(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_CALIBRATE")
    other, stored = nn.Linear(64, 64), nn.Sequential(prune_(nn.Linear(64, 64), 0.1))
    other.weight = nn.Parameter(TwoTensor(other.weight.detach(), other.weight.detach()))
    _compiled(other, torch.randn(4, 64))
    assert not seen, "nobody knows how such a one is computed with"
    gossamer.store_sparse(stored)
    _compiled(stored, torch.randn(4, 64))
    assert calibrated.this_machine().measured == {"f32"}


def test_masks_of_bools_make_zeros(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    masked = nn.Linear(64, 64)
    masked.register_buffer("mask", torch.rand(64, 64) < 0.1)
    masked.forward = lambda x: nn.functional.linear(x, masked.weight * masked.mask)  # type: ignore[method-assign]
    monkeypatch.delenv("GOSSAMER_CALIBRATE")
    _compiled(masked, torch.randn(4, 64))
    assert calibrated.this_machine().measured == {"f32"}


def test_a_calibration_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> dict[str, float]:
        raise RuntimeError("no clock")

    monkeypatch.setattr(calibrate, "fastest", fail)
    monkeypatch.setattr(first_use, "_failed", set())
    monkeypatch.delenv("GOSSAMER_CALIBRATE")
    model, x = prune_(nn.Linear(64, 64), 0.2).eval(), torch.randn(4, 64)
    for _ in range(2):
        _compiled(model, x)
    assert len([r for r in caplog.records if "cannot be calibrated (no clock)" in r.getMessage()]) == 1
    assert calibrated.this_machine().measured == frozenset()


@pytest.fixture
def processes(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], int]:
    """Compiles a pruned model as the first one of a process, while the machine is used by others or not; how often kernels were
    measured."""
    monkeypatch.delenv("GOSSAMER_CALIBRATE")
    monkeypatch.setattr("gossamer.backend.devices.budget.Budget.of", lambda _: None)

    def start(busy: bool) -> int:
        seen.clear()
        monkeypatch.setattr(first_use, "_asked", False)
        monkeypatch.setattr("gossamer.backend.devices.others.Others.share", 0.5 if busy else 0.0)
        _compiled(prune_(nn.Linear(64, 64), 0.2), torch.randn(4, 64))
        return len(seen)

    return start


def test_a_calibration_on_a_busy_machine_is_repeated_when_it_is_quiet(processes: Callable[[bool], int]) -> None:
    assert processes(True) and calibrated.in_doubt()
    assert not processes(True), "it would be no better"
    assert processes(False) and not calibrated.in_doubt()
    assert not processes(False)


def test_a_process_calibrates_once(seen: list[str], processes: Callable[[bool], int]) -> None:
    processes(False)
    calibrated.doubt()
    seen.clear()
    _compiled(prune_(nn.Linear(64, 48), 0.2), torch.randn(4, 64))
    assert not seen
    assert processes(False)


def test_after_some_repetitions_a_calibration_is_believed(processes: Callable[[bool], int]) -> None:
    processes(False)
    repeated = 0
    for _ in range(6):
        calibrated.doubt()
        repeated += processes(False) > 0
    assert repeated == calibrated._REPEATS
    gossamer.calibrate()
    calibrated.doubt()
    assert processes(False), "who calibrates by hand begins anew"


@pytest.mark.parametrize("content", ["[]", "{}", '{"doubted": 1, "repeats": "x"}', '{"doubted": true}'])
def test_a_damaged_record_of_doubts_is_no_doubt(directory: Path, content: str) -> None:
    calibrated.doubt()
    (record,) = directory.glob("calibration-*.json")
    record.write_text(content)
    assert not calibrated.in_doubt()


def test_threads_and_random_numbers_stay_as_they_were(seen: list[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    gossamer.calibrate()
    assert torch.equal(torch.rand(1), expected) and torch.get_num_threads() == 2
    torch.set_num_threads(threads)


@pytest.mark.parametrize("density, block, nm", [w for w in calibrate._WEIGHTS if w[1] or w[2]])
def test_reference_weights_have_their_structure(
    density: float, block: tuple[int, int] | None, nm: tuple[int, int] | None
) -> None:
    pattern = Pattern.of(calibrate.reference_weight(Matrix(512, 512, 1, "f32", 512, density, block, nm=nm)))
    assert pattern.block == block and pattern.rows.nm == nm
    assert pattern.density == pytest.approx(density, abs=0.04)
