"""What becomes of a convolution, and why."""

from dataclasses import dataclass

from gossamer.backend.convolution.convolution import Convolution
from gossamer.backend.convolution.cost import gain_of


@dataclass(frozen=True)
class Judgement:
    """What becomes of a convolution.

    able    whether a kernel of ours can compute it
    reason  why it stays dense, None if it does not
    gain    predicted for it alone
    """

    found: Convolution
    able: bool
    reason: str | None
    gain: float | None


def judged_by(found: Convolution, gain: float, min_gain: float) -> Judgement:
    """What becomes of one that a kernel can compute, by what it gains."""
    if gain >= min_gain:
        return Judgement(found, True, None, gain)
    what = "small" if gain_of(found, 0.01) < min_gain else "dense"
    return Judgement(found, True, f"too {what} for a gain of {min_gain:g}x", gain)
