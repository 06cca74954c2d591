"""What `gossamer.profile` returns: the time of each part of a call."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from gossamer.backend.profiling.clock import Call, Round
from gossamer.backend.profiling.moved import Moved
from gossamer.backend.report.machine import this_machine


@dataclass(frozen=True)
class Part:
    """A call of a sparse operation, in the order in which they run. All times are in microseconds.

    label        the modules whose weights it takes, and what else it computes
    operation    its name in torch, gossamer::...
    backward     whether it belongs to the backward pass
    us           the call; of it, machine code takes `kernel_us`, and packing weights that have changed `packing_us`
    weights      bytes of weights that it reads, as they are packed
    activations  bytes of other tensors that it reads, and of its results
    roofline     the time that this machine needs at best, as a share of the kernel's; None if it is unknown
    dense        whether torch computes it, because its weight has lost its zeros or changes at every call
    """

    label: str
    operation: str
    backward: bool
    us: float
    kernel_us: float
    packing_us: float
    weights: int
    activations: int
    roofline: float | None
    dense: bool

    @property
    def call_us(self) -> float:
        """What the call takes besides machine code and packing: finding the region, checking the weight, memory for results."""
        return max(0.0, self.us - self.kernel_us - self.packing_us)


@dataclass(frozen=True)
class Profile:
    """The time of a model's calls. `print` shows it as a table. All times are medians, in microseconds.

    us           a call, without the backward pass, which takes `backward_us`
    parts        the sparse operations
    guards_us    Dynamo's checks before the compiled code; a part of `outside_us`
    outside_us   what is not in a compiled graph: guards, and Python around and between graphs
    dense_us     the compiled graphs without the sparse operations, and `dense_backward_us` likewise
    calls        calls that were timed
    whole        whether all of them ran the same operations; otherwise those that did not are left out
    """

    us: float
    backward_us: float
    parts: Sequence[Part]
    guards_us: float
    outside_us: float
    dense_us: float
    dense_backward_us: float
    calls: int
    whole: bool
    events: Sequence[Mapping[str, Any]] = field(default=(), repr=False, compare=False)

    def data(self) -> dict[str, Any]:
        """The profile as JSON can hold it."""
        found = {name: value for name, value in vars(self).items() if name not in ("parts", "events")}
        parts = [{**asdict(each), "call_us": each.call_us} for each in self.parts]
        return {**found, "parts": parts, "machine": this_machine()}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace of one call for chrome://tracing or Perfetto. OSError if the file cannot be written."""
        Path(path).write_text(json.dumps({"traceEvents": list(self.events)}), encoding="utf-8")

    def __str__(self) -> str:
        from gossamer.backend.profiling.text import text_of

        return text_of(self)


def of_rounds(
    us: float,
    backward_us: float,
    rounds: Sequence[Round],
    moved: Sequence[Moved],
    operations: Sequence[str],
    guards_us: float,
    events: Sequence[Mapping[str, Any]],
) -> Profile:
    """The profile of calls with clocks, whose operations were named in one of them, beside the time of calls without clocks."""
    same = [each for each in rounds if [call.operation for call in each.calls] == list(operations)]
    parts = [_part(moved[n], [each.calls[n] for each in same], same) for n in range(len(moved))] if same else []
    outside = _median(each.forward - each.start - each.graphs for each in same or rounds)
    forward, back = (sum(part.us for part in parts if part.backward is which) for which in (False, True))
    dense, dense_backward = max(0.0, us - outside - forward), max(0.0, backward_us - back)
    whole = len(same) == len(rounds)
    return Profile(us, backward_us, parts, min(guards_us, outside), outside, dense, dense_backward, len(rounds), whole, events)


def _part(moved: Moved, calls: Sequence[Call], rounds: Sequence[Round]) -> Part:
    kernel = _median(call.kernel for call in calls)
    best = moved.least_us / kernel if moved.least_us is not None and kernel and not moved.dense else None
    return Part(
        moved.label, calls[0].operation, calls[0].start >= rounds[0].forward, _median(call.end - call.start for call in calls),
        kernel, _median(call.packing for call in calls), moved.weights, moved.activations, best, moved.dense,
    )  # fmt: skip


def _median(nanoseconds: Any) -> float:
    return median(nanoseconds) / 1e3
