"""Whether other processes use the machine: what the system says of its CPUs, less what this process took."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from gossamer.backend.devices import others, pace
from gossamer.backend.measuring.kept import kept
from tests.backend.harness import learn


class System:
    """Two CPUs, and clocks that go when they are told to."""

    def __init__(self, stat: Path) -> None:
        self.stat, self.wall, self.own, self.busy = stat, 0.0, 0.0, 0.0
        self.go(0.0, 0.0, 0.0)

    def go(self, wall: float, own: float, busy: float) -> None:
        """Seconds pass; in them this process works for some, and others do."""
        self.wall, self.own, self.busy = self.wall + wall, self.own + own, self.busy + own + busy
        ticks = round(100 * self.busy)
        self.stat.write_text(f"cpu  {ticks - 7} 0 3 4711 12 1 1 2 0 0\ncpu0 1 2 3 4\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    found = System(tmp_path / "stat")
    monkeypatch.setattr(others, "_STAT", str(found.stat))
    monkeypatch.setattr(others, "_before", (-10.0, None))
    monkeypatch.setattr(others.time, "perf_counter", lambda: found.wall)
    monkeypatch.setattr(others.time, "process_time", lambda: found.own)
    monkeypatch.setattr(others.time, "sleep", lambda seconds: found.go(seconds, 0.0, 0.0))
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(others.os, "sysconf", lambda _: 100)
    return found


@pytest.mark.parametrize(("own", "busy", "share"), [(1.0, 0.0, 0.0), (1.0, 1.0, 0.5), (0.0, 0.1, 0.05), (2.0, 0.0, 0.0)])
def test_the_share_of_all_cpus(system: System, own: float, busy: float, share: float) -> None:
    watch = others.Others()
    system.go(1.0, own, busy)
    assert watch.share == pytest.approx(share, abs=0.011)
    assert watch.disturb == (share > 0.1)


def test_what_was_shortly_before_counts(system: System) -> None:
    others.Others()
    system.go(0.5, 0.0, 0.5)
    watch = others.Others()
    system.go(0.01, 0.01, 0.0)
    assert watch.disturb


def test_what_was_long_before_does_not(system: System) -> None:
    others.Others()
    system.go(5.0, 0.0, 5.0)
    watch = others.Others()
    system.go(0.5, 0.5, 0.0)
    assert not watch.disturb


def test_a_system_that_does_not_tell_counts_as_quiet(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("", "cpu x y", "cpu 1 2 3"):
        monkeypatch.setattr(others, "_before", (-10.0, None))
        system.stat.write_text(content)
        assert others.quiet_now()
    system.stat.unlink()
    assert others.quiet_now()


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, object]]]:
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path / "cache"))

    def lines() -> list[dict[str, object]]:
        (path,) = (tmp_path / "cache").glob("thing-*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines() if line]

    return lines


def test_an_undisturbed_number_is_kept(journal: Callable[[], list[dict[str, object]]]) -> None:
    assert [kept("thing", [1, "x"], lambda: 7.0), kept("thing", [1, "x"], lambda: 9.0)] == [7.0, 7.0]
    assert len(journal()) == 1 and "disturbed" not in journal()[0]


def test_a_disturbed_number_is_measured_three_times_and_then_when_nobody_disturbs(
    journal: Callable[[], list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([9.0, 7.0, 8.0, 11.0])
    with monkeypatch.context() as patch:
        patch.setattr(others.Others, "share", 0.5)
        assert [kept("thing", [1], lambda: next(numbers)) for _ in range(5)] == [9.0, 7.0, 7.0, 7.0, 7.0]
        assert [line.get("disturbed") for line in journal()] == [True] * 3
    assert [kept("thing", [1], lambda: next(numbers)) for _ in range(2)] == [11.0, 11.0]


def test_a_number_beside_a_slow_loop_is_disturbed_once_the_machine_is_known_to_be_faster(
    journal: Callable[[], list[dict[str, object]]],
) -> None:
    def measure(value: float, loop: float) -> float:
        learn(loop)
        pace.note(loop)
        return value

    assert [kept("thing", [1], lambda: measure(9.0, 20.0)), kept("thing", [1], lambda: 1.0)] == [9.0, 9.0]
    learn(10.0)
    assert [kept("thing", [1], lambda: measure(7.0, 10.5)), kept("thing", [1], lambda: 1.0)] == [7.0, 7.0]
    assert [line["beside"] for line in journal()] == [20.0, 10.5]


def test_an_undisturbed_number_is_believed_more(
    journal: Callable[[], list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(others.Others, "share", 0.5)
        assert kept("thing", [1], lambda: 7.0) == 7.0
    assert [kept("thing", [1], lambda: 8.0), kept("thing", [1], lambda: 1.0)] == [8.0, 8.0]


def test_a_number_that_cannot_be_is_not_kept(journal: Callable[[], list[dict[str, object]]]) -> None:
    numbers = iter([9.0, 3.0, 5.0])
    small = lambda value: value < 4
    assert [kept("thing", [1], lambda: next(numbers), can_be=small) for _ in range(3)] == [9.0, 3.0, 3.0]
    assert [line["value"] for line in journal()] == [3.0]


def test_a_number_that_was_kept_and_cannot_be_is_measured_again(journal: Callable[[], list[dict[str, object]]]) -> None:
    assert kept("thing", [1], lambda: 3800.0) == 3800.0
    assert [kept("thing", [1], lambda: 2.0, can_be=lambda value: value < 10) for _ in range(2)] == [2.0, 2.0]
    assert [line["value"] for line in journal()] == [3800.0, 2.0]


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")], ids=["inference", "fake", "meta"]
)
def test_the_loop_goes_on_after_the_mode_in_which_it_was_made(mode: Callable[[], AbstractContextManager[object]]) -> None:
    pace._work.cache_clear()
    with mode():
        assert pace._loop_us() >= 1
    assert pace._loop_us() >= 1
    results = [call() for call in pace._work()[0]]
    assert all(type(each) is torch.Tensor and each.is_cpu and not each.is_inference() for each in results)
