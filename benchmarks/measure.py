"""One case, all contenders: prepare, check, then time them in turns.

Each contender is prepared (compiled, packed, called). Its result is compared with the dense model's in float64
before anything is timed and once more after the last round: a wrong result is an error and never a time.
Timed rounds visit the contenders in turn, starting with another one each round, so that a disturbance hits all
alike. A sample is a run of calls of at least `min_sample` seconds, divided by their number.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache

from benchmarks.machine import cpu_seconds_elsewhere
from benchmarks.registry import Contender, Prepared, Problem, Unsupported

BASELINES = ("dense", "inductor")  # the contenders that speed-ups are given over

FINAL = {"skipped", "error"}  # outcomes after which a contender is out

Clock = Callable[[], float]
Outcome = dict[str, Any]


class WrongResult(Exception):
    """A contender's result is not the dense model's."""


def reference(problem: Problem) -> Tensor:
    """The problem's result in float64."""
    model = copy.deepcopy(problem.model).double()
    result: Tensor = model(*(x.double() if x.is_floating_point() else x for x in problem.inputs))
    return result


def checked(result: Tensor, expected: Tensor, tolerance: float) -> float:
    """Largest error over largest magnitude expected; WrongResult if above `tolerance` or NaN."""
    if result.shape != expected.shape:
        raise WrongResult(f"wrong result: shape {tuple(result.shape)}, not {tuple(expected.shape)}")
    scale = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    error = ((result.double() - expected).abs().max() / scale).item()
    if not error <= tolerance:  # also when the error is NaN
        raise WrongResult(f"wrong result: relative error {error:.1e}, allowed {tolerance:.0e}")
    return error


def timed(call: Callable[[], object], times: int, clock: Clock) -> float:
    """Seconds that `times` calls took."""
    start = clock()
    for _ in range(times):
        call()
    return clock() - start


def repetitions(call: Callable[[], object], min_sample: float, clock: Clock) -> int:
    """How many calls fill `min_sample` seconds. The calls made to find out are the last warm-up."""
    times = 1
    while (elapsed := timed(call, times, clock)) < min_sample:
        times = max(2 * times, math.ceil(1.1 * times * min_sample / max(elapsed, 1e-9)))
    return times


def summary(milliseconds: list[float]) -> Outcome:
    low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return {"median_ms": median, "min_ms": min(milliseconds), "iqr_ms": high - low}


def rounds(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    min_sample: float,
    clock: Clock = time.perf_counter,
) -> dict[str, Outcome]:
    """Times `calls` in turns: the median, minimum and interquartile range of each, in milliseconds a call.

    `cores_elsewhere` is how many cores other processes kept busy meanwhile: near 0, or the figures mislead.
    """
    inner = {name: repetitions(call, min_sample, clock) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    before, start = cpu_seconds_elsewhere(), time.monotonic()
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            first = turn % max(1, len(order))
            for name in order[first:] + order[:first]:
                samples[name].append(1e3 * timed(calls[name], inner[name], clock) / inner[name])
    finally:
        gc.enable()
    elsewhere = max(0.0, cpu_seconds_elsewhere() - before) / (time.monotonic() - start)
    common = {"samples": repeats, "cores_elsewhere": elsewhere}
    return {name: summary(times) | common | {"inner": inner[name]} for name, times in samples.items()}


def speedups(outcomes: Mapping[str, Outcome]) -> None:
    """Adds to each timed outcome its speed-up over every baseline that was timed in the same rounds."""
    base = {name: outcomes[name]["median_ms"] for name in BASELINES if "median_ms" in outcomes.get(name, {})}
    for outcome in outcomes.values():
        if "median_ms" in outcome:
            outcome["speedup"] = {name: ms / outcome["median_ms"] for name, ms in base.items()}


def measure(
    problem: Problem,
    contenders: Mapping[str, Contender],
    *,
    threads: int = 1,
    repeats: int = 20,
    min_sample: float = 2e-3,
    cold: bool = False,
) -> dict[str, Outcome]:
    """What came of each contender: times and facts, {"error": why} or {"skipped": why}.

    `cold` empties Inductor's caches before each preparation, so that the `compile_s` of contenders compare.
    """
    torch.set_num_threads(threads)
    torch._dynamo.reset()  # else the shapes of the last case make Dynamo compile this one for dynamic shapes
    with torch.no_grad():
        expected = reference(problem)
        outcomes: dict[str, Outcome] = {name: {} for name in contenders}
        ready: dict[str, Prepared] = {}

        def prepare(name: str) -> Outcome:
            start = time.perf_counter()
            with fresh_cache() if cold else contextlib.nullcontext():
                ready[name] = contenders[name].prepare(problem)
                ready[name].call()
            return {"compile_s": time.perf_counter() - start}

        def check(name: str) -> Outcome:
            tolerance = problem.tolerance[contenders[name].precision]
            return {"error_max": checked(ready[name].call(), expected, tolerance)}

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
                    outcomes[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
                if not outcomes[name].keys().isdisjoint(FINAL):
                    ready.pop(name, None)

        attempt(prepare)
        attempt(lambda name: {"notes": ready[name].notes()})
        attempt(check)  # after the notes: taking them may have thrown away what was compiled
        times = rounds({name: prepared.call for name, prepared in ready.items()}, repeats, min_sample)
        attempt(lambda name: check(name) | times[name])
    speedups(outcomes)
    return outcomes
