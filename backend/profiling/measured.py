"""Defines the result of `gossamer.profile`: the time of each part of a call, as data and as a table of 100 columns."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gossamer.backend.profiling.clock import Call, Round
from gossamer.backend.profiling.moved import Moved
from gossamer.backend.report.machine import this_machine
from gossamer.backend.report.words import count, in_bytes, one_name, span, without_numbers

_WIDTH = 100


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
        """The time besides machine code and packing: finding the region, checking the weight, and memory for results."""
        return max(0.0, self.us - self.kernel_us - self.packing_us)


@dataclass(frozen=True)
class Profile:
    """The time of a model's calls. `print` shows it as a table. All times are medians, in microseconds.

    us           a call, without the backward pass, which takes `backward_us`
    parts        the sparse operations
    guards_us    Dynamo's checks before the compiled code; a part of `outside_us`
    outside_us   the time outside of compiled graphs: guards, and Python around and between graphs
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
        """Returns the profile as JSON values."""
        found = {name: value for name, value in vars(self).items() if name not in ("parts", "events")}
        parts = [{**asdict(each), "call_us": each.call_us} for each in self.parts]
        return {**found, "parts": parts, "machine": this_machine()}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace of one call for chrome://tracing or Perfetto. Raises OSError if the file cannot be written."""
        Path(path).write_text(json.dumps({"traceEvents": list(self.events)}), encoding="utf-8")

    def __str__(self) -> str:
        return _text(self)


def of_rounds(
    us: float,
    backward_us: float,
    rounds: Sequence[Round],
    moved: Sequence[Moved],
    operations: Sequence[str],
    guards_us: float,
    events: Sequence[Mapping[str, Any]],
) -> Profile:
    """Returns the profile of calls.

    us, backward_us  time of calls without clocks
    rounds           calls with clocks; those with other operations than `operations` are left out
    moved            for each operation, what its call moved
    """
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


def _text(profile: Profile) -> str:
    """Returns the summary and the table as text."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(_summary(profile))
    if not profile.whole:
        console.print("Not all calls ran the same operations; those that did not are left out.")
    console.print(_table(profile))
    if any(part.dense for part in profile.parts):
        console.print("* torch computes it: its weight has lost its zeros, or changes at every call.")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def in_time(us: float) -> str:
    """Returns microseconds as text, in a unit that fits."""
    size, unit = (us / 1e6, "s") if us >= 999.5e3 else (us / 1e3, "ms") if us >= 999.5 else (us, "us")
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"


def _summary(profile: Profile) -> str:
    total = profile.us + profile.backward_us
    of = f", {in_time(profile.backward_us)} of it backward" if profile.backward_us else ""
    sparse = sum(part.us for part in profile.parts)
    threads = profile.data()["machine"]["threads"]
    return (
        f"gossamer: {in_time(total)} a call{of}, median of {count(profile.calls, 'call')} on {count(threads, 'thread')}; "
        f"{sparse / total:.0%} in sparse kernels and their calls"
    )


def _table(profile: Profile) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, width=_WIDTH)
    table.add_column("part", overflow="fold", ratio=1)
    for name in ("time", "share", "kernel", "call", "packing", "weights", "other", "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    total = profile.us + profile.backward_us
    groups: dict[object, list[Part]] = {}
    for part in profile.parts:
        groups.setdefault((without_numbers(part.label), part.operation, part.backward, part.dense), []).append(part)
    for parts in groups.values():
        table.add_row(*_row(parts, total))
    dense = [("dense", profile.dense_us), ("dense, backward", profile.dense_backward_us), ("guards", profile.guards_us)]
    dense.append(("Python outside of graphs", max(0.0, profile.outside_us - profile.guards_us)))
    for name, us in dense:
        if us:
            table.add_row(name, in_time(us), f"{us / total:.0%}")
    return table


def _row(parts: Sequence[Part], total: float) -> list[str]:
    us, packing = sum(each.us for each in parts), sum(each.packing_us for each in parts)
    times = f" (x{len(parts)})" if len(parts) > 1 else ""
    roofs = [100 * each.roofline for each in parts if each.roofline is not None]
    return [
        one_name([each.label for each in parts]) + times + "*" * parts[0].dense,
        in_time(us),
        f"{us / total:.0%}",
        in_time(sum(each.kernel_us for each in parts)),
        in_time(sum(each.call_us for each in parts)),
        in_time(packing) if packing else "-",
        in_bytes(sum(each.weights for each in parts)),
        in_bytes(sum(each.activations for each in parts)),
        span(roofs, "{:.0f}".format, "%"),
    ]
