"""`Trial`: a graph is compiled with sparse or with dense convolutions, to be timed as a whole (see whole_graphs.py)."""

from dataclasses import dataclass

_CLOSE = 0.75, 1.5
"""The predicted gain of a graph is close to 1 between these two. Work between the convolutions counts on neither side."""


@dataclass(eq=False)
class Trial:
    """Whether the convolutions of a graph are sparse if their predicted gain together is close to 1.

    sparse  whether they are
    close   whether the prediction was close, so that the trial decided
    """

    sparse: bool
    close: bool = False

    def decides(self, gain: float, factor: float) -> bool:
        """Whether the trial decides, given the predicted gain. A gain is also close if it is up to `factor` times as high."""
        least, most = _CLOSE
        self.close |= least <= gain <= most * factor
        return self.close
