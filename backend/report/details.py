"""Data classes for the numbers behind one `Decision`, for the report's page: the competing schedules, and the zeros needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.passes.framework.family import Matrix


@dataclass(frozen=True)
class Contender:
    """A schedule that competed for a weight, or "dense".

    name          the name of the schedule
    predicted_us  microseconds of a call by the cost model; None if it has no prediction
    measured_us   microseconds that were measured on this machine; None if nobody measured it
    terms         the terms of the prediction, with the names of the cost model; empty for "dense"
    """

    name: str
    predicted_us: float | None
    measured_us: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """The data to predict contenders and needed zeros. The prediction takes milliseconds, so only reports make it.

    device     the device of the product
    matrix     the weight as schedules see it, with a rounded pattern
    density    the weight's own density
    tokens     the number of tokens; None if it is not known
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

    tokens      the number of tokens that the decision is for
    dynamic     whether calls may have other numbers of tokens
    element     type of the weight's elements
    contenders  the schedules that competed, the fastest prediction first
    pays_from   share of zeros from which on the layer alone gains enough, to 1 %; None if no share does, or it is not known
    region      the key of the region; weights with equal keys are computed by one kernel call
    stages      the name under which the dump has the kernel's stages; empty without a dump
    end         where the kernel ends, and why; empty for convolutions, and if it is not sparse
    arrays      names and bytes of the arrays that the weight is packed in
    whole       whether the decision's gain is that of the whole kernel. The contenders are for this weight alone
    question    the data to predict `contenders` and `pays_from`; None afterwards
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
