"""Tells how fast this machine runs at the moment, compared with its best.

A short loop is timed beside each measurement on one thread. The clock of a thread stops while other processes have its core.
But processes on other cores, and on other virtual machines, slow it down if they share caches, vector units or AMX. They do not
slow down all contenders alike: on one Xeon, in phases of up to half a second, dense products of bf16 take 2.2 times longer,
those of f32 1.2 times. So times and ratios from such a phase are wrong, and the system does not tell of it.

The least time of the loop is kept on disk, and each measurement is kept with the time of its loop. If the machine turns out to
be faster than it was during a measurement, that measurement does not count any more.
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
"""The machine counts as undisturbed up to so many times the least. A process on the same core slows it down by 1.5."""

_WRONG = 1.5
"""The same factor for earlier measurements. It is larger, because the least falls a little with every measurement."""

_MOST_SLOWER = 2.5
"""The most that others slow the machine down while this process has its core."""

_NEWS = 0.97
"""A new least replaces the recorded one if it is below this share of it."""

_MET = 5
"""The least is the fifth-smallest time, because single times may be wrong."""

_LOOKS = 15
_WAIT_S, _WAITS = 0.02, 100
"""Seconds of one wait for a quieter moment, and the most waits of a process."""

_noted = list[float]()
_waits = 0


def loop_us() -> float | None:
    """Returns the microseconds of the loop now. None if torch has several threads, whose clocks it does not read."""
    return _loop_us() if torch.get_num_threads() == 1 else None


def _loop_us() -> float:
    with disable_current_modes(), torch.inference_mode(False):  # its tensors are kept beyond the modes of a compilation
        calls, small = _work()
        _us(calls)  # fills the caches, which other code has used
        return max(min(_us(calls) for _ in range(_TIMES)) - min(_us(small) for _ in range(_TIMES)), 1.0)


def _us(calls: Sequence[Callable[[], object]]) -> float:
    start = time.thread_time()
    for call in calls:
        call()
    return (time.thread_time() - start) * 1e6


def is_quiet(us: float) -> bool:
    """Whether no process slows the machine down, if the loop takes so many microseconds. True if no least is known yet."""
    return us <= _SLOWER * _Least.of().us


def counts(us: float) -> bool:
    """Whether a measurement counts, if the loop beside it took so many microseconds."""
    return us <= _WRONG * _Least.of().us


def slowness(us: float | None) -> float:
    """Returns how many times slower than its best the machine is, if the loop takes so many microseconds; 1 for None."""
    return 1.0 if us is None else min(max(us / _Least.of().us, 1.0), _MOST_SLOWER)


def learn(us: float) -> None:
    """Takes in the time of a loop, or the mean of two. The least is kept."""
    _Least.of().take(us)


def note(us: float) -> None:
    """Notes the time of the loop beside a measurement, for `since`."""
    _noted.append(us)


def noted() -> int:
    """Returns how many measurements were noted. Pass it to `since` after further measurements."""
    return len(_noted)


def since(number: int) -> float | None:
    """Returns the slowest loop of the measurements noted since then; None if there are none."""
    return max(_noted[number:], default=None)


def settle_for(number: int, us: float | None) -> None:
    """Replaces the notes since then by one, that of the measurement that counts; by none for None."""
    del _noted[number:]
    if us is not None:
        note(us)


def waited() -> bool:
    """Waits a moment for other processes to end. Returns False at once if this process has used up its waits."""
    global _waits
    if _waits >= _WAITS:
        return False
    _waits += 1
    time.sleep(_WAIT_S)
    return True


def quiet_now() -> bool | None:
    """Whether the machine is about as fast now as at its best so far. None if the loop cannot tell."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        looks = sorted(us for _ in range(_LOOKS) if (us := loop_us()) is not None)
    finally:
        torch.set_num_threads(threads)
    return is_quiet(looks[len(looks) // 2]) if looks else None


class _Least:
    """The least time of the loop in this and earlier processes: the fifth-smallest, because single times may be wrong."""

    def __init__(self) -> None:
        self._record = f"pace-{identity()}"
        found = records.read(self._record)
        known = found.get("us") if isinstance(found, dict) else None
        self._kept = known if isinstance(known, float) and known > 0 else math.inf
        self._smallest = [self._kept] * _MET if self._kept < math.inf else []

    @staticmethod
    def of() -> "_Least":
        """Returns the record of the cache directory that is used now."""
        return _least(cache_files.directory(), records.loaded())

    @property
    def us(self) -> float:
        """The least in microseconds; infinite if nothing is known yet."""
        return self._smallest[-1] if self._smallest else math.inf

    def take(self, us: float) -> None:
        """Takes in a time, and records the least if it fell clearly."""
        self._smallest = sorted([*self._smallest, us])[:_MET]
        if len(self._smallest) == _MET and self.us < _NEWS * self._kept:
            self._kept = self.us
            records.write(self._record, {"us": self.us})


@cache
def _least(_directory: Path | None, _loaded: int) -> _Least:
    return _Least()


@cache
def _work() -> tuple[Sequence[Callable[[], object]], Sequence[Callable[[], object]]]:
    """Returns the products of the loop, and tiny ones that tell how long a call of torch takes, which depends on modes."""
    kinds = [(torch.float32, 128), (torch.bfloat16, 256)] if "amx" in host().instructions else [(torch.float32, 128)]
    return [_product(size, dtype) for dtype, size in kinds], [_product(_TINY, dtype) for dtype, _ in kinds]


def _product(size: int, dtype: torch.dtype) -> Callable[[], object]:
    factor = torch.ones(size, size, dtype=dtype, device="cpu")
    result = torch.empty_like(factor)
    return lambda: torch.mm(factor, factor, out=result)
