"""How fast this machine runs at the moment, beside the best that it has shown.

A short loop is timed beside all that one thread measures. The clock of a thread stands still while other processes have its
core. But those on other cores, and on other virtual machines, slow it down if they share caches, vector units or AMX.
Contenders do not suffer alike: on one Xeon, phases of up to half a second slow down dense products of bf16 by 2.2 and those of
f32 by 1.2. So times and ratios that are measured in such a phase are wrong, and the system does not tell of it.

The least time of the loop is kept on disk, and what is measured has the time of its loop beside it. If the machine turns out to
be faster than it was at a measurement, that one does not count any more.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from gossamer.backend.devices.identity import identity
from gossamer.runtime import cache_files, records
from gossamer.runtime.target import host
from gossamer.runtime.torch_internals import disable_current_modes

_TINY, _TIMES = 16, 3
_SLOWER = 1.35
"""Times the least of the loop up to which the machine counts as undisturbed: others in the same core slow it down by 1.5."""

_WRONG = 1.5
"""The same for what was measured already: the least of the loop falls a little with every measurement."""

_MOST_SLOWER = 2.5
"""What others slow it down by at most, while this process has its core."""

_NEWS = 0.97
"""How far below the record a time has to be to replace it."""

_MET = 5
"""How often a time has to be met to count as the least."""

_LOOKS = 15
_WAIT_S, _WAITS = 0.02, 100
"""Seconds of a wait for a better moment, and how many waits a process has."""

_noted = list[float]()
_waits = 0


def loop_us() -> float | None:
    """Microseconds that the loop takes now. None where torch has several threads, whose clocks this one does not read."""
    return _loop_us() if torch.get_num_threads() == 1 else None


def _loop_us() -> float:
    with disable_current_modes(), torch.inference_mode(False):  # the tensors of the loop outlast the modes of a compilation
        calls, small = _work()
        _us(calls)  # what ran before has had the caches
        return max(min(_us(calls) for _ in range(_TIMES)) - min(_us(small) for _ in range(_TIMES)), 1.0)


def _us(calls: Sequence[Callable[[], object]]) -> float:
    start = time.thread_time()
    for call in calls:
        call()
    return (time.thread_time() - start) * 1e6


def is_quiet(us: float) -> bool:
    """Whether nobody slows down the machine if the loop takes so many microseconds; true as long as nothing else is known."""
    return us <= _SLOWER * _Least.of().us


def counts(us: float) -> bool:
    """Whether what was measured beside a loop of so many microseconds counts."""
    return us <= _WRONG * _Least.of().us


def slowness(us: float | None) -> float:
    """How many times slower than at its best the machine is where the loop takes so many microseconds; 1 if none was timed."""
    return 1.0 if us is None else min(max(us / _Least.of().us, 1.0), _MOST_SLOWER)


def learn(us: float) -> None:
    """Tells the time of a loop, or a mean of some: the least one is kept."""
    _Least.of().take(us)


def note(us: float) -> None:
    """Notes the loop beside something that was measured, for those who ask what a measurement is worth."""
    _noted.append(us)


def noted() -> int:
    """How many measurements were noted: give it to `since` after more of them."""
    return len(_noted)


def since(number: int) -> float | None:
    """The slowest loop of the measurements that were noted since then; None if there are none."""
    return max(_noted[number:], default=None)


def settle_for(number: int, us: float | None) -> None:
    """Replaces the notes since then by one: that of the measurement which counts among them."""
    del _noted[number:]
    if us is not None:
        note(us)


def waited() -> bool:
    """Waits a moment for others to end, if this process has not waited for too long already; whether it did."""
    global _waits
    if _waits >= _WAITS:
        return False
    _waits += 1
    time.sleep(_WAIT_S)
    return True


def quiet_now() -> bool | None:
    """Whether the machine is as fast now as it was at its best, as far as that is known. None if the loop cannot tell."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        looks = sorted(us for _ in range(_LOOKS) if (us := loop_us()) is not None)
    finally:
        torch.set_num_threads(threads)
    return is_quiet(looks[len(looks) // 2]) if looks else None


class _Least:
    """The least time of the loop, of this and earlier processes. It was met several times, because single ones are off."""

    def __init__(self) -> None:
        self._record = f"pace-{identity()}"
        found = records.read(self._record)
        known = found.get("us") if isinstance(found, dict) else None
        self._kept = known if isinstance(known, float) and known > 0 else math.inf
        self._smallest = [self._kept] * _MET if self._kept < math.inf else []

    @staticmethod
    def of() -> "_Least":
        """That of the cache that is used now."""
        return _least(cache_files.directory(), records.loaded())

    @property
    def us(self) -> float:
        """Its microseconds; infinite as long as nothing is known."""
        return self._smallest[-1] if self._smallest else math.inf

    def take(self, us: float) -> None:
        """Considers a time, and records it if it is news."""
        self._smallest = sorted([*self._smallest, us])[:_MET]
        if len(self._smallest) == _MET and self.us < _NEWS * self._kept:
            self._kept = self.us
            records.write(self._record, {"us": self.us})


@cache
def _least(_directory: Path | None, _loaded: int) -> _Least:
    return _Least()


@cache
def _work() -> tuple[Sequence[Callable[[], object]], Sequence[Callable[[], object]]]:
    """The products of the loop, and tiny ones, which take what it takes to call torch: in some modes that is a multiple."""
    kinds = [(torch.float32, 128), (torch.bfloat16, 256)] if "amx" in host().instructions else [(torch.float32, 128)]
    return [_product(size, dtype) for dtype, size in kinds], [_product(_TINY, dtype) for dtype, _ in kinds]


def _product(size: int, dtype: torch.dtype) -> Callable[[], object]:
    factor = torch.ones(size, size, dtype=dtype, device="cpu")
    result = torch.empty_like(factor)
    return lambda: torch.mm(factor, factor, out=result)
