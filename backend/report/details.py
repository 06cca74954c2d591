"""The numbers behind one `Decision`, for the report as a page: which schedules competed, and what would have to change."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.passes.framework.family import Matrix


@dataclass(frozen=True)
class Contender:
    """A schedule that competed for a weight, or "dense".

    name          of the schedule
    predicted_us  microseconds of a call by the cost model; None if it has no prediction
    measured_us   microseconds that were measured on this machine; None if nobody measured it
    terms         what the prediction is made of, in the words of the cost model; empty for "dense"
    """

    name: str
    predicted_us: float | None
    measured_us: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """What contenders and zeros are predicted from. That takes milliseconds, so it waits until somebody wants to see them.

    device     that the product is for
    matrix     the weight as schedules see it, and `density` its own
    tokens     None if their number is open
    us         measured microseconds by schedule
    copies_us  microseconds of transposes around the kernel
    min_gain   the option
    """

    device: str
    matrix: Matrix
    density: float
    tokens: int | None
    us: Mapping[str, float]
    copies_us: float
    min_gain: float


@dataclass(frozen=True)
class Details:
    """The numbers behind one decision.

    tokens      rows of the input that the decision is for; `dynamic` if their number is open
    element     type of the weight's elements
    contenders  the fastest prediction first
    pays_from   share of zeros from which on the layer alone gains enough, to 1 %; None if no share is, or nobody knows
    region      what the weights that one kernel call computes have in common
    stages      the region whose stages the dump has for that kernel; empty without a dump
    end         where the kernel ends, and why; empty if it is not sparse
    arrays      names and bytes of the arrays that the weight is packed in
    whole       whether the decision's gain is that of the whole kernel. The contenders are for this weight alone
    question    what `contenders` and `pays_from` are predicted from, until they are
    """

    tokens: int
    dynamic: bool
    element: str
    contenders: tuple[Contender, ...] = ()
    pays_from: float | None = None
    region: str = ""
    stages: str = ""
    end: str = ""
    arrays: tuple[tuple[str, int], ...] = ()
    whole: bool = False
    question: Question | None = None
