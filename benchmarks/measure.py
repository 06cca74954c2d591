"""One case, all contenders: prepare, check, then time them in turns.

Each contender is prepared (compiled, packed, called). Its result is compared with one in float64
before anything is timed and once more after the last round: a wrong result is an error and never a time.
Timed rounds visit the contenders in turn, starting with another one each round, so that a disturbance hits all
alike. A sample is a run of calls of at least `min_sample` seconds, divided by their number. Some 10 ms of calls that are not
timed come first: a short one takes three times as long after others have been at the caches and the predictors of branches.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from benchmarks.machine import cpu_seconds_elsewhere
from benchmarks.registry import BASELINES, Contender, Outcome, Prepared, Problem, Settings, Unsupported, WrongResult
from benchmarks.roofline import placed

FINAL = {"skipped", "error"}  # outcomes after which a contender is out

_LEAST = 5  # samples of a contender that is too slow for more

_WARMING = 0.01  # seconds of calls before each sample, fewer than half a call is none

# Idle threads of PyTorch's team spin this long before they sleep: in the way of whoever brings threads of its own.
_SPINNING = 0.015

Clock = Callable[[], float]


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from; Dynamo keeps what a backend raised in `inner_exception`."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = getattr(following, "inner_exception", None) or following.__cause__


def checked(problem: Problem, result: Any, expected: Any, tolerance: float) -> float:
    """The error of a result; WrongResult if it is above `tolerance` or NaN."""
    error = problem.error(result, expected)
    if not error <= tolerance:  # also when the error is NaN
        raise WrongResult(f"wrong result: relative error {error:.1e}, allowed {tolerance:.0e}")
    return error


def timed(call: Callable[[], object], times: int, clock: Clock) -> float:
    """Seconds that `times` calls took."""
    start = clock()
    for _ in range(times):
        call()
    return clock() - start


def repetitions(call: Callable[[], object], min_sample: float, clock: Clock) -> tuple[int, float]:
    """How many calls fill `min_sample` seconds, and the seconds of such a sample. The calls are the last warm-up.

    A sample counts as long only if the next one is, too: one of its calls may have made ready what all later ones use.
    """
    times = 1
    while (elapsed := timed(call, times, clock)) < min_sample or (elapsed := timed(call, times, clock)) < min_sample:
        times = max(2 * times, math.ceil(1.1 * times * min_sample / max(elapsed, 1e-9)))
    return times, elapsed


def summary(milliseconds: list[float]) -> Outcome:
    low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return {"median_ms": median, "min_ms": min(milliseconds), "iqr_ms": high - low, "samples": len(milliseconds)}


def turned(names: Sequence[str], by: int) -> list[str]:
    """The names in the same order, but from another one on."""
    first = by % max(1, len(names))
    return [*names[first:], *names[:first]]


def rounds(
    calls: Mapping[str, Callable[[], object]],
    settings: Settings,
    apart: Collection[str] = (),
    clock: Clock = time.perf_counter,
) -> dict[str, Outcome]:
    """Times `calls` in turns: the median, minimum and interquartile range of each, in milliseconds a call.

    Those that are `apart` take their turns after the others, when the others' threads have come to rest.
    `cores_elsewhere` is how many cores other processes kept busy meanwhile: near 0, or the figures mislead.
    """
    repeats = settings.repeats
    inner, warming, turns = {}, {}, {}
    for name, call in calls.items():
        inner[name], sample = repetitions(call, settings.min_sample, clock)
        warming[name] = round(_WARMING * inner[name] / max(sample, 1e-9))
        turns[name] = max(min(_LEAST, repeats), min(repeats, int(settings.seconds / sample)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    before, start = cpu_seconds_elsewhere(), time.monotonic()
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            due = [name for name in calls if (turn + 1) * turns[name] // repeats > turn * turns[name] // repeats]
            for group in ([name for name in due if name not in apart], [name for name in due if name in apart]):
                if group and group[0] in apart:
                    time.sleep(_SPINNING)
                for name in turned(group, turn):
                    timed(calls[name], warming[name], clock)
                    samples[name].append(1e3 * timed(calls[name], inner[name], clock) / inner[name])
    finally:
        gc.enable()
    elsewhere = max(0.0, cpu_seconds_elsewhere() - before) / (time.monotonic() - start)
    return {name: summary(times) | {"cores_elsewhere": elsewhere, "inner": inner[name]} for name, times in samples.items()}


def speedups(outcomes: Mapping[str, Outcome], baselines: Sequence[str] = BASELINES["contenders"]) -> None:
    """Adds to each timed outcome its speed-up over every baseline that was timed in the same rounds."""
    base = {name: outcomes[name]["median_ms"] for name in baselines if "median_ms" in outcomes.get(name, {})}
    for outcome in outcomes.values():
        if "median_ms" in outcome:
            outcome["speedup"] = {name: ms / outcome["median_ms"] for name, ms in base.items()}


def race(
    problem: Problem,
    contenders: Mapping[str, Contender],
    threads: int = 1,
    settings: Settings | None = None,
    machine: dict[str, Any] | None = None,
    baselines: Sequence[str] = BASELINES["contenders"],
) -> dict[str, Outcome]:
    """What came of each contender: times and facts, {"error": why} or {"skipped": why}.

    With `machine`, the peaks at this number of threads, contenders that say how large their weights are get their
    place under the roof too.
    """
    settings = settings or Settings()
    torch.set_num_threads(threads)
    torch.compiler.reset()  # else the shapes of the last case make Dynamo compile this one for dynamic shapes
    gc.collect()  # what was packed for the last case
    with torch.no_grad():
        expected, work = problem.reference()
        outcomes: dict[str, Outcome] = {name: {} for name in contenders}
        ready: dict[str, Prepared] = {}

        def precision(name: str) -> str:
            return contenders[name].precision or problem.precision

        def prepare(name: str) -> Outcome:
            start = time.perf_counter()
            with fresh_cache() if settings.cold else contextlib.nullcontext():
                ready[name] = contenders[name].prepare(problem)
                ready[name].call()
            return {"compile_s": time.perf_counter() - start}

        def check(name: str) -> Outcome:
            return {"error_max": checked(problem, ready[name].call(), expected, problem.tolerance[precision(name)])}

        def place(name: str) -> Outcome:
            weights = outcomes[name]["notes"].get("weight_bytes")
            if machine is None or not weights:  # a network of convolutions has no bytes of linear layers
                return {}
            return {"roofline": placed(outcomes[name]["median_ms"], work, weights, precision(name), machine)}

        def attempt(step: Callable[[str], Outcome]) -> None:
            """Takes the step with every contender that has not failed before."""
            for name in [name for name, outcome in outcomes.items() if outcome.keys().isdisjoint(FINAL)]:
                try:
                    outcomes[name] |= step(name)
                except Unsupported as reason:
                    outcomes[name] = {"skipped": str(reason)}
                except WrongResult as error:
                    outcomes[name] = {"error": str(error)}
                except Exception as error:  # whatever a contender raises is a finding about it
                    *_, first = causes(error)
                    outcomes[name] = {"error": f"{type(first).__name__}: {str(first)[:500]}"}
                if not outcomes[name].keys().isdisjoint(FINAL):
                    ready.pop(name, None)

        attempt(prepare)
        attempt(check)
        attempt(lambda name: {"notes": ready[name].notes()})
        apart = [name for name in ready if threads > 1 and contenders[name].own_threads]
        times = rounds({name: prepared.call for name, prepared in ready.items()}, settings, apart)
        attempt(lambda name: check(name) | times[name])
        attempt(place)
    speedups(outcomes, baselines)
    return outcomes
