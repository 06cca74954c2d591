"""How contenders are timed, by a clock that goes as the test says."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher

from gossamer.backend.devices import pace
from gossamer.backend.measuring import measure
from gossamer.backend.measuring.measure import fastest
from tests.backend.harness import learn


class Clock:
    """Calls take some seconds of it."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def call(self, seconds: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1
            self.now += next(seconds)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(measure.time, "thread_time", lambda: found.now)
    return found


def steady(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def then(first: list[float], last: float) -> Iterator[float]:
    yield from first
    yield from steady(last)


def test_the_minimum_of_the_rounds_counts(clock: Clock) -> None:
    warm_up = [0.5, 0.5]
    slow = clock.call(then([*warm_up, 0.4, 0.002, 0.3, 0.002], 0.004))
    assert fastest({"a": slow, "b": clock.call(steady(0.003))}, 1, rounds=4) == pytest.approx({"a": 2000, "b": 3000})


def test_there_are_more_rounds_until_every_other_one_agrees(clock: Clock) -> None:
    # Two calls warm up, and three are rounds, of which only the second one was undisturbed.
    disturbed = clock.call(then([0.5, 0.5, 0.5, 0.1, 0.5, 0.5, 0.4], 0.1))
    assert fastest({"a": disturbed}, 1, rounds=3) == pytest.approx({"a": 1e5})
    assert clock.calls == 2 + 7


def test_rounds_end_although_nothing_agrees(clock: Clock) -> None:
    def alternating() -> Iterator[float]:
        while True:
            yield from (0.1, 0.5)

    fastest({"a": clock.call(alternating())}, 1, rounds=3)
    assert clock.calls == 2 + 9


def test_a_hopeless_contender_is_timed_twice(clock: Clock) -> None:
    fastest({"a": clock.call(steady(0.002))}, 1)
    alone = clock.calls
    fastest({"a": clock.call(steady(0.002)), "b": clock.call(steady(1.0))}, 1)
    assert clock.calls == 2 * alone + 2 + 2


@pytest.fixture
def loops(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[float]], None]:
    """Has the loop take some microseconds, one after the other, and waits end at once."""
    monkeypatch.setenv("GOSSAMER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pace, "_noted", [])
    monkeypatch.setattr(pace, "_waits", 0)
    monkeypatch.setattr(pace.time, "sleep", lambda _: None)

    def take(us: Iterator[float]) -> None:
        monkeypatch.setattr(pace, "loop_us", lambda: next(us))

    return take


def test_samples_beside_a_slow_loop_do_not_count(clock: Clock, loops: Callable[[Iterator[float]], None]) -> None:
    """In the slow phase both look as if they took as long."""
    learn(10.0)
    loops(then([18.0] * 9, 10.0))
    a, b = clock.call(then([0.05] * 6, 0.02)), clock.call(then([0.05] * 6, 0.03))
    assert fastest({"a": a, "b": b}, 1, rounds=4) == pytest.approx({"a": 2e4, "b": 3e4})
    assert pace.since(0) == 10.0


def test_a_sample_that_was_slowed_down_between_loops_is_not_believed(
    clock: Clock, loops: Callable[[Iterator[float]], None]
) -> None:
    """Of all rounds but the last ones a single one lies between quick loops, and others slow down the call all the same."""
    learn(10.0)
    loops(then([18.0] * 4 + [10.0] * 2 + [18.0] * 8, 10.0))
    assert fastest({"a": clock.call(then([0.05] * 15, 0.02))}, 1, rounds=4) == pytest.approx({"a": 2e4})
    assert pace.since(0) == 10.0


def test_samples_that_never_agree_end_and_are_noted(clock: Clock, loops: Callable[[Iterator[float]], None]) -> None:
    def alternating() -> Iterator[float]:
        while True:
            yield from (0.1, 0.5)

    learn(10.0)
    loops(steady(10.0))
    assert fastest({"a": clock.call(alternating())}, 1, rounds=2) == pytest.approx({"a": 1e5})
    assert clock.calls == 2 + 2 * measure._AT_MOST
    assert pace.since(0) == 10.0


def test_if_the_machine_is_slow_throughout_all_samples_count_and_the_note_says_so(
    clock: Clock, loops: Callable[[Iterator[float]], None]
) -> None:
    learn(10.0)
    loops(steady(17.0))
    assert fastest({"a": clock.call(steady(0.02))}, 1, rounds=2) == pytest.approx({"a": 2e4})
    assert pace.since(0) == 17.0 and not pace.counts(17.0)
    assert clock.calls == 2 + 6 + pace._WAITS


def test_a_slow_phase_is_waited_for(clock: Clock, loops: Callable[[Iterator[float]], None]) -> None:
    learn(10.0)
    loops(then([18.0] * 10, 10.0))
    assert fastest({"a": clock.call(then([0.05] * 12, 0.02))}, 1, rounds=2) == pytest.approx({"a": 2e4})
    assert pace.since(0) == 10.0


def test_the_least_of_the_loop_is_kept(loops: Callable[[Iterator[float]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    learn(10.0)
    pace._least.cache_clear()
    loops(steady(16.0))
    assert pace.quiet_now() is False
    loops(steady(11.0))
    assert pace.quiet_now() is True
    loops(steady(None))  # type: ignore[arg-type]
    assert pace.quiet_now() is None


def test_operations_are_timed_without_the_dispatcher_of_tracing() -> None:
    """It makes each of them take 9 to 15 us more, and products of small layers take less."""
    seen = list[bool]()

    def call() -> None:
        seen.append(torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher"))

    with enable_python_dispatcher():
        call()
        fastest({"a": call}, 1, rounds=1)
        call()
    assert seen[0] and seen[-1] and not any(seen[1:-1])
