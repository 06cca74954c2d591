"""Schedules say when masks change in training, and how dense the model is then. Steps of the optimizer count from 1.

once(at)                       at one step; 0 is before the first
Cubic(begin, end, every)       sparsity rises, by the cube of the remaining steps (Zhu and Gupta, 2017)
Exchange(begin, end, every)    sparsity is constant; a share of the nonzeros changes places (Evci et al., 2020)
Fading(begin, end, every)      pruned weights fade before they vanish (Kao et al., 2022)
Stepwise(begin, end, every)    N of N:M falls in steps (Kao et al., 2022)
"""

from dataclasses import dataclass
from math import ceil, cos, exp, log2, pi

from gossamer.dialects.errors import OptionError
from gossamer.dialects.option_check import check_share


@dataclass(frozen=True)
class Schedule:
    """Says when masks are computed anew: at step `begin`, then every `every` steps until `end`, and at `end`."""

    begin: int = 0
    end: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 <= self.begin <= self.end:
            raise OptionError(
                f"begin is {self.begin}, end {self.end} and every {self.every}: must be 0 <= begin <= end, and every >= 1"
            )

    def is_due(self, step: int) -> bool:
        """Whether masks are computed anew after a step."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)

    def sparsity(self, step: int, first: float, final: float) -> float:
        """Returns the share of zeros from this step on, between the first and the final share."""
        return final if step >= self.begin else first

    def exchanged(self, step: int) -> float:
        """Returns the share of the nonzeros that move at this step."""
        return 0.0

    def fading(self, step: int) -> float:
        """Returns the factor of pruned weights at this step, from 1 (dense) to 0."""
        return 0.0 if step >= self.begin else 1.0

    def kept(self, step: int, n: int, m: int) -> int:
        """Returns how many of every m neighbours the mask keeps at this step, on the way to n."""
        return n if step >= self.begin else m


def once(at: int = 0) -> Schedule:
    """Returns a schedule of one step; 0 is before the first."""
    return Schedule(at, at)


@dataclass(frozen=True)
class Cubic(Schedule):
    """Sparsity rises as final + (first - final) (1 - (t - begin) / (end - begin))^3 (Zhu and Gupta, 2017, section 3)."""

    def sparsity(self, step: int, first: float, final: float) -> float:
        left = 1 - (min(max(step, self.begin), self.end) - self.begin) / max(1, self.end - self.begin)
        return final + (first - final) * left**3


@dataclass(frozen=True)
class Exchange(Schedule):
    """Some nonzeros move to other places at each change. No nonzero moves at step 0.

    `fraction` is the share of the nonzeros that move. With `anneal` it falls as fraction / 2 (1 + cos(pi t / end))
    (Evci et al., 2020, section 3, formula 2).
    """

    fraction: float = 0.3
    anneal: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("fraction (of the nonzeros that move)", self.fraction)

    def exchanged(self, step: int) -> float:
        if step == 0:
            return 0.0
        return self.fraction / 2 * (1 + cos(pi * step / max(1, self.end))) if self.anneal else self.fraction


@dataclass(frozen=True)
class Fading(Schedule):
    """Pruned weights fade: they are multiplied by 1 - t, or by exp(-rate t) if `rate` is given.

    t rises from 0 at step `begin` to 1 at step `end`. From then on the factor is 0.
    """

    rate: float | None = None

    def fading(self, step: int) -> float:
        at = (step - self.begin) / max(1, self.end - self.begin)
        if at >= 1:
            return 0.0
        return 1.0 if at <= 0 else 1 - at if self.rate is None else exp(-self.rate * at)


@dataclass(frozen=True)
class Stepwise(Schedule):
    """N falls in steps: M - 1, M / 2, M / 4, …, and the wanted N at step `settled` (structure decay, Kao et al., 2022)."""

    settled: int = 0

    def kept(self, step: int, n: int, m: int) -> int:
        stages = [max(n, m - 1), *(m >> i for i in range(1, ceil(log2(m / n))) if n < m >> i < m - 1), n]
        at = (step - self.begin) / max(1, self.settled - self.begin)
        return m if at < 0 else stages[min(len(stages) - 1, int(at * (len(stages) - 1)))]
