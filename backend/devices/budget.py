"""What is measured while a graph is compiled, and for how long.

mode="max-autotune" measures all that is promising, however long that takes. Otherwise a prediction is believed unless it is
close, or the packed weight would be larger than the dense one, or the product is so small that its call decides. Such products
are measured, the heaviest first. Those whose schedules are close follow, as long as time enough is left for chains and
convolutions. Equal ones share their times, on disk, too.
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
"""Predicted gains between which a prediction is close; by how much wider apart they are if the calibration is in doubt."""

_SMALL_US = 30.0
"""Microseconds of a dense product up to which the call decides."""

_DENSE = 0.6
"""The density above which a value and its position take more bytes than they save."""

_SECONDS = 6.0

CLOSE = 2.0
"""Times the fastest prediction up to which another schedule may turn out to be the fastest."""

KEPT_S = 2.0
"""Seconds that products leave to chains and convolutions, which are measured after them."""


@dataclass(eq=False)
class Budget:
    """What may be measured for one graph.

    everything  whether all that is promising is measured (mode="max-autotune")
    uncertain   whether the calibration that predictions go by is in doubt
    seconds     that are left for this thread's work, counted as if nobody slowed the machine down
    settled     whether all that was close has been measured, and nobody else used the machine: then another process would
                decide alike
    """

    everything: bool = False
    uncertain: bool = False
    seconds: float = field(default_factory=lambda: _SECONDS)
    settled: bool = True

    @classmethod
    def of(cls, everything: bool) -> Self | None:
        """The one of a compilation. None where nothing is measured: where GOSSAMER_CALIBRATE=0, or without a cache on disk."""
        if everything:
            return cls(everything=True, seconds=math.inf)
        if not CALIBRATE.get() or cache_files.directory() is None:
            return None
        return cls(uncertain=calibrated.in_doubt())

    def doubts(self, gain: float, dense_us: float, density: float) -> bool:
        """Whether a predicted gain over a dense product of so many microseconds is to be measured."""
        wider = _WIDER if self.uncertain else 1.0
        return gain >= _LEAST / wider and (gain <= _MOST * wider or dense_us <= _SMALL_US or density > _DENSE)

    def compares(self, gain: float, us: Sequence[float]) -> bool:
        """Whether schedules of these predicted microseconds, the fastest first, are to be compared for a product that gains."""
        return gain >= _LEAST and len(us) > 1 and us[1] <= CLOSE * us[0] and self.seconds > KEPT_S

    def allows(self, keep: float = 0.0) -> bool:
        """Whether more seconds are left than are to be kept. To be asked before something is measured that is in doubt."""
        if self.seconds <= keep:
            self.settled = False
        return self.seconds > keep

    @contextmanager
    def spend(self, decides: bool = True) -> Iterator[None]:
        """What is done in here takes from the time.

        Where it `decides` whether something is sparse, it is not settled if others use the machine meanwhile. Schedules that
        are compared side by side are slowed down alike.
        """
        began, others = time.thread_time(), Others()
        try:
            yield
        finally:
            self.seconds -= (time.thread_time() - began) / pace.slowness(others.beside)
            self.settled &= not (decides and others.disturb)
