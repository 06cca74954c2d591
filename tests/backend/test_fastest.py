"""How contenders are timed, by a clock that goes as the test says."""

from collections.abc import Callable, Iterator

import pytest

from gossamer.backend.measuring import measure
from gossamer.backend.measuring.measure import fastest


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
