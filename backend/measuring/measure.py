"""Measures a product with a weight: the bare kernels of several schedules and torch's dense product, side by side.

In each round every contender runs once, so that a disturbance hits all of them. The minimum over rounds counts. With one
thread, the clock is that of the thread, which stops while other processes have the core. tune.py, calibrate.py and others call
`fastest`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from statistics import median
from typing import NamedTuple

import torch
from torch import fx

from gossamer.backend.devices import pace
from gossamer.backend.devices.measured_times import DENSE
from gossamer.backend.regions.compiled_kernel import format_of
from gossamer.dialects.errors import CompileError, FormatError
from gossamer.passes.framework.family import Matrix
from gossamer.runtime.packing import Packed, pack
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.torch_internals import no_python_dispatcher
from gossamer.sparsity.compiler.compile_kernel import compile_region

log = logging.getLogger("gossamer")

_ROUNDS, _SAMPLE_S, _MOST_CALLS = 9, 1e-3, 10_000
_AT_MOST = 6  # factor on the rounds if undisturbed samples of one thread differ
_HOPELESS = 3.0  # a contender that takes so many times longer than the fastest is not timed any more
_AGREE = 1.25  # ratio up to which the minima of even and of odd rounds count as equal

Clock = Callable[[], float]
Call = Callable[[], object]


class Product:
    """x @ w.T with a real weight. It is stored as [M, K], or as [K, M] if `matrix` reduces over dimension 0."""

    def __init__(self, weight: torch.Tensor, matrix: Matrix) -> None:
        self._matrix, self._weight = matrix, weight
        self._sparse: dict[str, tuple[RegionKernel, Packed] | None] = {}

    def calls(self, tokens: int, schedules: Iterable[str]) -> dict[str, Call]:
        """Returns calls that compute the product for random tokens, by name: DENSE, and all schedules that compile."""
        given = torch.float32 if self._matrix.given is not None else self._weight.dtype
        x, weight = random(tokens, self._matrix.columns, dtype=given), self._weight.to(given)
        calls: dict[str, Call] = {DENSE: dense_product(x, weight.t() if self._matrix.reduction == 1 else weight)}
        results = given if given.is_floating_point else torch.float32
        for schedule in schedules:
            if schedule not in self._sparse:
                self._sparse[schedule] = self._prepared(schedule)
            if (prepared := self._sparse[schedule]) is not None:
                kernel, packed = prepared
                calls[schedule] = partial(kernel, [x, packed], x.new_empty(tokens, self._matrix.rows, dtype=results))
        return calls

    def _prepared(self, schedule: str) -> tuple[RegionKernel, Packed] | None:
        try:
            kernel = kernel_of(self._matrix, self._weight.dtype, schedule)
            return kernel, pack(self._weight, format_of(kernel))
        except (CompileError, FormatError) as problem:
            log.info("%s is not measured: %s", schedule, problem)
            return None


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns normal values; integers have a deviation of 40. Does not use torch's global generator, which is the user's."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return values.to(dtype) if dtype.is_floating_point else values.mul(40).clamp(-127, 127).to(dtype)


def dense_product(x: torch.Tensor, factor: torch.Tensor) -> Call:
    """Returns the call by which torch computes x @ factor."""
    return partial(torch.mm if x.is_floating_point() else torch.ops.aten._int_mm.default, x, factor)


@lru_cache(maxsize=64)
def kernel_of(matrix: Matrix, dtype: torch.dtype, schedule: str) -> RegionKernel:
    """Returns the kernel of the bare product, for any number of tokens. Raises CompileError if the schedule has none."""
    from gossamer.backend.regions.importer import import_region  # torch-mlir's front end takes half a second to load

    by_rows, graph = matrix.reduction == 1, fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    given = torch.float32 if matrix.given is not None else dtype
    x.meta = {"shape": (None, matrix.columns), "dtype": given}
    w.meta = {"shape": (matrix.rows, matrix.columns) if by_rows else (matrix.columns, matrix.rows), "dtype": dtype}
    factors = given if given.is_floating_point else torch.int32  # int8 factors are widened

    def converted(node: fx.Node, has: torch.dtype, wanted: torch.dtype) -> fx.Node:
        return node if has == wanted else graph.call_function(torch.ops.prims.convert_element_type.default, (node, wanted))

    stored = converted(w, dtype, factors)
    factor = graph.call_function(torch.ops.aten.permute.default, (stored, [1, 0])) if by_rows else stored
    product = graph.call_function(torch.ops.aten.mm.default, (converted(x, given, factors), factor))
    graph.output(converted(product, factors, factors if factors.is_floating_point else torch.float32))
    return compile_region(import_region(fx.GraphModule({}, graph, "Product"), matrix, None), schedule=schedule)


def fastest(calls: Mapping[str, Call], threads: int, rounds: int = _ROUNDS) -> dict[str, float]:
    """Returns the microseconds of a call of each contender: the minimum over rounds. A sample takes at least a millisecond.

    Measures at least `rounds` rounds, and more until the minima of even and of odd rounds are about the same. With several
    threads, it stops after three times as many rounds. With one thread, only those samples count for this in which nobody
    slowed the machine down (see `pace`). It then takes up to six times as many rounds, or waits longer if there are no such
    samples. One minimum is not enough: a sample may be disturbed although the loops before and after it were not.
    """
    with no_python_dispatcher():  # with the dispatcher of tracing, each operation of torch would take 9 to 15 us more
        return _fastest(calls, threads, rounds)


def _fastest(calls: Mapping[str, Call], threads: int, rounds: int) -> dict[str, float]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    times = {name: _repetitions(call, clock) for name, call in calls.items()}
    found = {name: _Samples() for name in calls}
    before = pace.loop_us() if threads == 1 else None
    number, promising = 0, list(calls)
    while True:
        if number >= rounds and all(found[name].agree for name in promising):
            break
        if number >= 3 * rounds:
            known = all(found[name].quiet() for name in promising)
            if (known and (before is None or number >= _AT_MOST * rounds)) or not pace.waited():
                break
        for name in promising:
            us, after = _timed(calls[name], times[name], clock), pace.loop_us() if threads == 1 else None
            beside = math.nan if before is None or after is None else (before + after) / 2
            found[name].add(number % 2, us, beside)
            before = after
        number += 1
        slowest = _HOPELESS * min(each.least for each in found.values())
        promising = [name for name in calls if number < 2 or found[name].least <= slowest]
    if before is not None:
        pace.note(max(found[name].beside for name in promising))
    return {name: each.least for name, each in found.items()}


class _Sample(NamedTuple):
    """Microseconds of a call, microseconds of the loop of `pace` beside it (nan if not timed), and 1 if its round was odd."""

    us: float
    beside: float
    half: int


class _Samples:
    """The samples of one contender."""

    def __init__(self) -> None:
        self.all = list[_Sample]()

    def add(self, half: int, us: float, beside: float) -> None:
        """Adds a sample."""
        if not math.isnan(beside):
            pace.learn(beside)
        self.all.append(_Sample(us, beside, half))

    def quiet(self) -> list[_Sample]:
        """Returns the samples that nobody disturbed, as far as is known by now."""
        return [sample for sample in self.all if math.isnan(sample.beside) or pace.is_quiet(sample.beside)]

    @property
    def least(self) -> float:
        """The least microseconds of all samples, because disturbances only make calls slower."""
        return min(sample.us for sample in self.all)

    @property
    def beside(self) -> float:
        """The time of the loop beside the best undisturbed sample. If undisturbed samples differ, the median beside all."""
        return min(self.quiet()).beside if self.agree else median(sample.beside for sample in self.all)

    @property
    def agree(self) -> bool:
        """Whether the minima of undisturbed samples in odd and in even rounds are about the same."""
        quiet = self.quiet()
        even, odd = (min((s.us for s in quiet if s.half == half), default=math.inf) for half in (0, 1))
        return max(even, odd) <= _AGREE * min(even, odd) < math.inf


def _repetitions(call: Call, clock: Clock) -> int:
    """Returns how many calls take as long as a sample. These calls also warm up."""
    call()
    times = 1
    while (elapsed := _timed(call, times, clock) * times * 1e-6) < _SAMPLE_S and times < _MOST_CALLS:
        times = min(max(2 * times, int(1.1 * times * _SAMPLE_S / max(elapsed, 1e-9))), _MOST_CALLS)
    return times


def _timed(call: Call, times: int, clock: Clock) -> float:
    """Returns the mean microseconds of `times` calls."""
    start = clock()
    for _ in range(times):
        call()
    return (clock() - start) * 1e6 / times
