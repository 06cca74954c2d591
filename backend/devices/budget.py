"""Decides what is measured while a graph is compiled, and for how long.

mode="max-autotune" measures all promising products, however long that takes. Otherwise, a product is measured if one of these
holds:

- the predicted gain is close to 1,
- the packed weight would be larger than the dense one,
- the product is so small that the time of its call decides.

The heaviest are measured first. Products whose schedules are close follow, if enough time is left for chains and convolutions.
Equal products share their times, also on disk.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from gossamer.backend.devices import calibrated, pace
from gossamer.backend.devices.others import Others
from gossamer.dialects.settings import CALIBRATE
from gossamer.runtime import cache_files

_LEAST, _MOST, _WIDER = 0.6, 2.0, 2.0
"""A predicted gain between the first two is close. If the calibration is in doubt, the interval is wider by the last factor."""

_SMALL_US = 30.0
"""Dense products of at most so many microseconds are small: the time of a call decides."""

_DENSE = 0.6
"""The density above which values and positions take more bytes than the dense weight."""

_SECONDS = 6.0
"""Seconds that one graph may measure, except with "max-autotune"."""

CLOSE = 2.0
"""A schedule that is predicted to take at most so many times longer than the fastest may turn out to be the fastest."""

KEPT_S = 2.0
"""Seconds that products leave for chains and convolutions, which are measured after them."""


@dataclass(eq=False)
class Budget:
    """What may be measured for one graph.

    everything  whether to measure all promising products (mode="max-autotune")
    uncertain   whether the calibration behind the predictions is in doubt
    seconds     seconds of this thread's work that are left, counted as if no process slowed the machine down
    settled     whether all close predictions were measured, undisturbed, so that another process would decide alike
    """

    everything: bool = False
    uncertain: bool = False
    seconds: float = field(default_factory=lambda: _SECONDS)
    settled: bool = True

    @classmethod
    def of(cls, everything: bool) -> Self | None:
        """Returns the budget of a compilation. None with GOSSAMER_CALIBRATE=0 or without a cache: it may not measure."""
        if everything:
            return cls(everything=True, seconds=math.inf)
        if not CALIBRATE.get() or cache_files.directory() is None:
            return None
        return cls(uncertain=calibrated.in_doubt())

    def doubts(self, gain: float, dense_us: float, density: float) -> bool:
        """Whether to measure a product, given its predicted gain, the microseconds of the dense product, and its density."""
        wider = _WIDER if self.uncertain else 1.0
        return gain >= _LEAST / wider and (gain <= _MOST * wider or dense_us <= _SMALL_US or density > _DENSE)

    def compares(self, gain: float, us: Sequence[float]) -> bool:
        """Whether to compare schedules by measurement. `us` are their predicted microseconds, the fastest first."""
        return gain >= _LEAST and len(us) > 1 and us[1] <= CLOSE * us[0] and self.seconds > KEPT_S

    def allows(self, keep: float = 0.0) -> bool:
        """Whether more than `keep` seconds are left. Ask before you measure a prediction that is in doubt."""
        if self.seconds <= keep:
            self.settled = False
        return self.seconds > keep

    @contextmanager
    def spend(self, decides: bool = True) -> Iterator[None]:
        """Subtracts the time of the block from `seconds`.

        If the block `decides` whether something is sparse, the budget is not settled if other processes disturb it. Schedules
        that are compared side by side are slowed down alike.
        """
        began, others = time.thread_time(), Others()
        try:
            yield
        finally:
            self.seconds -= (time.thread_time() - began) / pace.slowness(others.beside)
            self.settled &= not (decides and others.disturb)
