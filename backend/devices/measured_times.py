"""`Times`: measured times of a product's contenders, for a class of numbers of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

DENSE = "dense"
"""The name of torch's own product among the schedules."""

_MOST_TOKENS = 1024

_MOST_OF_PREDICTED = 8.0
"""The factor by which a measured gain may exceed the predicted one. Predictions are wrong by a factor of about three. But if
another process has a core, threads of a dense product wait for it, and samples take hundreds or thousands of times longer."""


def tokens_class(tokens: int) -> int:
    """Returns the next power of two, at most 1024. Products with numbers of tokens in one class share times."""
    return min(1 << max(0, tokens - 1).bit_length(), _MOST_TOKENS)


def believable(gain: float, predicted: float) -> bool:
    """Whether a measured gain over the dense product is believable, given the predicted one."""
    return gain <= _MOST_OF_PREDICTED * max(predicted, 1.0)


@dataclass(frozen=True)
class Times:
    """Microseconds by schedule and DENSE. `origin` names another kind of weight that they were measured on, or is None."""

    us: Mapping[str, float]
    origin: str | None = None

    @property
    def fastest(self) -> str:
        """The schedule with the least time, or DENSE."""
        return min(self.us, key=self.us.__getitem__)

    def are_believable(self, predicted: Mapping[str, float]) -> bool:
        """Whether all gains are believable, given predicted microseconds."""
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
