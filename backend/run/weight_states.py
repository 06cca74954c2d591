"""States of a weight under one packing, what may have happened to the tensors it is computed from, and what is done then.

A step is a method of `Packings` that returns the weight in its next state, or None where it does not apply.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import Tensor

from gossamer.runtime.packing import Packed

if TYPE_CHECKING:
    from gossamer.backend.graph.masked_values import MaskedValues
    from gossamer.backend.graph.packed_order import Places

SETTLED = 2
"""Calls that a packing must have served before a new pattern is packed at once."""

RESTLESS = 3
"""Changes in a row, each after a single call, by which a weight counts as changing at every call."""


class State(Enum):
    """What is known about the tensors of a weight."""

    UNKNOWN = auto()  # nothing
    WAITING = auto()  # it runs densely until it stays the same for two calls: its pattern is new at every call
    DENSE = auto()  # it runs densely until it changes (see lost_zeros.py): too dense to pay, or not what the format holds
    PACKED = auto()  # as the matrix was
    PLACED = auto()  # as stored values were, by places that find no others
    LENT = auto()  # the same, but a packing has values for the time of a call only


class Change(Enum):
    """What happened since its last call."""

    FIRST = auto()  # these tensors are new
    FLOOD = auto()  # so they are at every call
    NONE = auto()  # its values are as they were
    STORED = auto()  # stored values are new, not the structure of the matrix
    FACTOR = auto()  # one of parameter and mask is new
    MATRIX = auto()  # any of its values may be
    RESTLESS = auto()  # the same at every call, and to gather values costs more than sparse saves


@dataclass(eq=False, slots=True)
class KnownWeight:
    """What is known about a weight at one version.

    packed    None while it is run dense
    nonzeros  when it was packed, and `density` now
    calls     that this packing has served, and `before` those of earlier versions
    changes   versions in a row that served a single call
    places    see `StoredMatrix.places`, and `masked` `MaskedValues`; None until they are needed
    whole     whether stored zeros have their places in `packed`, too, for they may become others
    refused   why the format does not hold it, and it is run dense as one that is too dense; empty where it does
    lent      whether `packed` has values for the time of a call only, and none now
    """

    packed: Packed | None = None
    nonzeros: int = 0
    density: float = 0.0
    calls: int = 0
    before: int = 0
    changes: int = 0
    places: "Places | None" = None
    masked: "MaskedValues | None" = None
    whole: bool = False
    refused: str = ""
    lent: bool = False

    def state(self, densest: float) -> State:
        """For a region that is faster densely above a density."""
        if self.packed is None:
            return State.DENSE if self.density > densest else State.WAITING
        if self.lent:
            return State.LENT
        return State.PLACED if self.is_placed else State.PACKED

    @property
    def is_placed(self) -> bool:
        """Whether `places` alone can give it new values: what compares them and finds them in a matrix is not kept beside."""
        return self.places is not None and self.packed is not None and self.packed.source_or_none is None

    @property
    def lacks_source(self) -> bool:
        """Whether a packing is there whose values cannot be found in the weight."""
        return self.packed is not None and not self.packed.has_source


@dataclass(frozen=True, eq=False)
class News:
    """What happened to a weight.

    leaves   the tensors that it is computed from, as they are now
    written  the numbers of those that changed, and how often in a row after a single call: `changes`
    densest  density above which its region is faster densely
    counted  whether versions tell all that will happen, so that values need not be compared
    """

    change: Change
    leaves: list[Tensor]
    written: list[int]
    changes: int
    densest: float
    counted: bool


TRANSITIONS: dict[tuple[State, Change], tuple[str, ...]] = {
    (State.UNKNOWN, Change.FIRST): ("_packed",),
    (State.WAITING, Change.NONE): ("_packed",),
    (State.DENSE, Change.NONE): ("_kept",),
    (State.PACKED, Change.NONE): ("_kept",),
    (State.PLACED, Change.NONE): ("_kept",),
    (State.LENT, Change.NONE): ("_owning",),
    (State.PACKED, Change.STORED): ("_taken_over",),
    (State.PLACED, Change.STORED): ("_taken_over",),
    (State.LENT, Change.STORED): ("_taken_over",),
    (State.PACKED, Change.FACTOR): ("_gathered", "_refreshed", "_repacked"),
    (State.PACKED, Change.MATRIX): ("_refreshed", "_repacked"),
    (State.PLACED, Change.MATRIX): ("_repacked",),
    (State.PLACED, Change.RESTLESS): ("_repacked",),
    (State.LENT, Change.MATRIX): ("_repacked",),
    (State.LENT, Change.RESTLESS): ("_repacked",),
}
"""What is done, one after the other; where none of it applies, the weight waits."""
