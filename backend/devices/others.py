"""Whether other processes disturb what is measured: then it is not kept for good."""

import math
import os
import time

from gossamer.backend.devices import pace

_STAT = "/proc/stat"
_BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of its first line: user, nice, system, irq, softirq, and steal, which other virtual machines take."""

_SHARE = 0.1
"""Of all CPUs, from which on others count: one process on a machine of ten CPUs."""

_SHORTEST_S, _LONGEST_S = 0.1, 1.0
"""The system counts in hundredths of a second, so a shorter time does not tell: what was shortly before counts, too."""

_before: tuple[float, float | None] = -math.inf, None
"""When the machine was looked at last, and how long its CPUs had worked for others."""


class Others:
    """Watches the machine from now on."""

    def __init__(self) -> None:
        global _before
        now = time.perf_counter()
        if now - _before[0] > _LONGEST_S:
            _before = now, _others_s()
        self._began, self._busy = _before
        self._noted = pace.noted()

    @property
    def share(self) -> float:
        """The share of all CPUs that other processes have used since then; 0 where the system does not tell."""
        if self._busy is None:
            return 0.0
        time.sleep(max(0.0, self._began + _SHORTEST_S - time.perf_counter()))
        elapsed, busy = time.perf_counter() - self._began, _others_s()
        if busy is None:
            return 0.0
        return max(0.0, busy - self._busy) / elapsed / (os.cpu_count() or 1)

    @property
    def beside(self) -> float | None:
        """The slowest loop that was timed beside what was measured since then; None if none was."""
        return pace.since(self._noted)

    @property
    def disturb(self) -> bool:
        """Whether they made measurements wrong: by the loops that were timed beside them or, without loops, by the share."""
        return self.share > _SHARE if self.beside is None else not pace.counts(self.beside)


def quiet_now() -> bool:
    """Whether nobody else slows down the machine; it takes a moment to tell."""
    known = pace.quiet_now()
    return not Others().disturb if known is None else known


def _others_s() -> float | None:
    """Seconds that the CPUs have worked for others than this process; None where the system does not tell."""
    try:
        with open(_STAT, encoding="ascii") as file:
            fields = [int(number) for number in file.readline().split()[1:]]
        return sum(fields[n] for n in _BUSY) / os.sysconf("SC_CLK_TCK") - time.process_time()
    except (OSError, ValueError, IndexError):
        return None
