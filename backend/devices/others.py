"""Finds out whether other processes disturb measurements. Disturbed measurements are repeated later."""

import math
import os
import time

from gossamer.backend.devices import pace

_STAT = "/proc/stat"
_BUSY = (0, 1, 2, 5, 6, 7)
"""Fields of the first line of /proc/stat: user, nice, system, irq, softirq, and steal (time of other virtual machines)."""

_SHARE = 0.1
"""Other processes count as disturbing above this share of all CPUs: one process on a machine with ten CPUs."""

_SHORTEST_S, _LONGEST_S = 0.1, 1.0
"""The shortest time to watch, because the system counts in hundredths of a second. The time before the first call is watched,
too, if the last look was at most the longest time ago."""

_before: tuple[float, float | None] = -math.inf, None
"""Time of the last look at the machine, and the seconds that its CPUs had worked for others by then."""


class Others:
    """Watches the other processes of the machine from now on."""

    def __init__(self) -> None:
        global _before
        now = time.perf_counter()
        if now - _before[0] > _LONGEST_S:
            _before = now, _others_s()
        self._began, self._busy = _before
        self._noted = pace.noted()

    @property
    def share(self) -> float:
        """The share of all CPUs that others have used since then; 0 if the system does not tell."""
        if self._busy is None:
            return 0.0
        time.sleep(max(0.0, self._began + _SHORTEST_S - time.perf_counter()))
        elapsed, busy = time.perf_counter() - self._began, _others_s()
        if busy is None:
            return 0.0
        return max(0.0, busy - self._busy) / elapsed / (os.cpu_count() or 1)

    @property
    def beside(self) -> float | None:
        """The slowest loop of `pace` that was timed beside measurements since then; None if none was."""
        return pace.since(self._noted)

    @property
    def disturb(self) -> bool:
        """Whether others made measurements wrong, by the loops that were timed beside these, or by `share` without loops."""
        return self.share > _SHARE if self.beside is None else not pace.counts(self.beside)


def quiet_now() -> bool:
    """Whether no other process slows the machine down. Takes a moment."""
    known = pace.quiet_now()
    return not Others().disturb if known is None else known


def _others_s() -> float | None:
    """Returns the seconds that the CPUs have worked for other processes; None if the system does not tell."""
    try:
        with open(_STAT, encoding="ascii") as file:
            fields = [int(number) for number in file.readline().split()[1:]]
        return sum(fields[n] for n in _BUSY) / os.sysconf("SC_CLK_TCK") - time.process_time()
    except (OSError, ValueError, IndexError):
        return None
