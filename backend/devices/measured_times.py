"""What a product took: the times of its contenders, for a class of numbers of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

DENSE = "dense"
"""The name of torch's own product among the schedules."""

_MOST_TOKENS = 1024

_MOST_OF_PREDICTED = 8.0
"""Predictions are wrong by a factor of three or so. A dense product whose threads wait for a core that other processes have is
slower by hundreds or thousands, in all of its samples."""


def tokens_class(tokens: int) -> int:
    """The next power of two, up to 1024: products of such numbers of tokens share times."""
    return min(1 << max(0, tokens - 1).bit_length(), _MOST_TOKENS)


def believable(gain: float, predicted: float) -> bool:
    """Whether a gain over the dense product that was measured can be, beside the predicted one."""
    return gain <= _MOST_OF_PREDICTED * max(predicted, 1.0)


@dataclass(frozen=True)
class Times:
    """Microseconds by schedule and DENSE; `origin` names the weight that they were measured on, None for this one."""

    us: Mapping[str, float]
    origin: str | None = None

    @property
    def fastest(self) -> str:
        """The schedule, or DENSE, of the least time."""
        return min(self.us, key=self.us.__getitem__)

    def are_believable(self, predicted: Mapping[str, float]) -> bool:
        """Whether they can be, beside predicted microseconds."""
        known = [name for name in self.us if name in predicted]
        return DENSE not in known or all(
            believable(self.us[DENSE] / self.us[name], predicted[DENSE] / predicted[name]) for name in known
        )

    def __str__(self) -> str:
        order = sorted(self.us, key=self.us.__getitem__)
        figures = ", ".join(f"{name} {_number(self.us[name])} us" for name in order)
        return f"measured{f' on {self.origin}' if self.origin else ''}: {figures}"


def _number(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"
