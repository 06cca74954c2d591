"""The state machine of a packed weight: its states, the changes of the tensors that it is computed from, and the transitions.

`Packings` (packed_weights.py) runs it. A step of a transition is one of its methods. A step returns the weight in its next
state, or None if the step does not apply.
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
"""If a packing has served so many calls, a new pattern is packed at once. Otherwise the weight waits."""

RESTLESS = 3
"""After so many changes in a row, each after a single call, a weight counts as changing at every call."""


class State(Enum):
    """How a weight runs at the moment."""

    UNKNOWN = auto()  # its tensors are new
    WAITING = auto()  # dense until two calls have the same values, because its pattern was new at every call
    DENSE = auto()  # dense until it changes (see lost_zeros.py): too dense to gain, or the format cannot hold it
    PACKED = auto()  # packed from the dense matrix
    PLACED = auto()  # packed from stored values; `places` maps each stored value to its place in the packing
    LENT = auto()  # the same, but the packing has values only during a call


class Change(Enum):
    """What happened to a weight since its last call."""

    FIRST = auto()  # these tensors are new
    FLOOD = auto()  # tensors are new at every call
    NONE = auto()  # its values have not changed
    STORED = auto()  # stored values have changed, but not the structure of the matrix
    FACTOR = auto()  # either the parameter or the mask has changed
    MATRIX = auto()  # any values may have changed
    RESTLESS = auto()  # any values change at every call, and gathering them costs more than the sparse kernel saves


@dataclass(eq=False, slots=True)
class KnownWeight:
    """What is known about a weight at one version of its leaves.

    packed    the packed weight; None while it runs dense
    nonzeros  the number of nonzeros when it was packed
    density   the density now
    calls     the calls that this packing has served, at all versions
    before    the calls among them at earlier versions
    changes   the number of versions in a row that served a single call
    places    see `StoredMatrix.places`; None until needed
    masked    see `MaskedValues`; None until needed
    whole     whether `packed` has stored zeros, too, because training may change them
    refused   why the format cannot hold the weight, which then runs dense; empty if it can
    lent      whether `packed` has values only during a call
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
        """Returns the state, for a region that is faster dense above the density `densest`."""
        if self.packed is None:
            return State.DENSE if self.density > densest else State.WAITING
        if self.lent:
            return State.LENT
        return State.PLACED if self.is_placed else State.PACKED

    @property
    def is_placed(self) -> bool:
        """Whether only `places` can give it new values. The positions of its values in the dense matrix are not kept."""
        return self.places is not None and self.packed is not None and self.packed.source_or_none is None

    @property
    def lacks_source(self) -> bool:
        """Whether there is a packing that does not know the positions of its values in the dense matrix."""
        return self.packed is not None and not self.packed.has_source


@dataclass(frozen=True, eq=False)
class News:
    """A change of a weight.

    change   the kind of the change
    leaves   the tensors that the weight is computed from, as they are now
    written  the indices of the leaves that changed
    changes  the number of changes in a row, each after a single call
    densest  the density above which its region is faster dense
    counted  whether torch counts all later writes, so that values need not be compared
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
"""The steps of each transition. `Packings` tries them in order. If none applies, the weight waits: it runs dense."""
