"""The report for users. Its text is a table of 100 characters a line, in which equal layers of a stack share a row."""

import io
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gossamer.backend.page.saved import sizes
from gossamer.backend.report.machine import this_machine
from gossamer.backend.report.options import SCHEDULES
from gossamer.backend.report.report import FEW_ZEROS, NO_PRODUCT, NO_ZEROS, Decision
from gossamer.backend.report.words import (
    count,
    in_bytes,
    in_percent,
    one_name,
    one_reason,
    span,
    times,
    without_numbers,
    without_times,
)

_WIDTH = 100
_NAME = 32


class Measured(Protocol):
    """The result of `gossamer.profile`."""

    def data(self) -> dict[str, Any]: ...


@dataclass
class Report:
    """All decisions of one compilation. `print(report)` shows them as a table.

    decisions     the decisions in the order of the graph, forward before backward; weights without zeros are at the end
    graph_breaks  the reasons for which Dynamo split the model, each with your line; no sparse region crosses a break
    kernels       number of different kernels that the sparse decisions use. Operations over edge lists and SparseTensors
                  compile theirs when they are called: each use of such an operation counts as one kernel
    seconds       time of each graph pass, over all graphs; empty if the graphs were in the cache on disk
    off           features that are off because this version of torch lacks an interface; one sentence each
    training      whether gradients were compiled
    other         the report of the other mode, inference or training; None if it was not compiled
    min_gain      the option: the gain that a layer needs to become sparse
    patterns      the positions of each weight's nonzeros, as data for the page
    flows         the parts of each graph and their connections, as data for the page
    dump          the folder of the option `dump_ir`, whose code the page shows; None without it
    """

    decisions: list[Decision] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    kernels: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    training: bool = False
    other: "Report | None" = None
    min_gain: float = 1.1
    patterns: dict[str, Any] = field(default_factory=dict, repr=False)
    flows: list[Any] = field(default_factory=list, repr=False)
    dump: str | None = None

    @property
    def layers(self) -> dict[str, bool]:
        """For each weight's name, whether a sparse kernel runs any use of it."""
        taken = {decision.name for decision in self.sparse}
        return {decision.name: decision.name in taken for decision in self.decisions}

    @property
    def sparse(self) -> list[Decision]:
        """The decisions for which a sparse kernel runs."""
        return [d for d in self.decisions if d.sparse]

    @property
    def dense_bytes(self) -> int:
        """Dense bytes of the packed weights. Each weight counts once. `prepare(free_dense=True)` frees these bytes."""
        return self._sizes()[0]

    @property
    def packed_bytes(self) -> int:
        """Packed bytes of the same weights. Each weight counts once for each format."""
        return self._sizes()[1]

    def _sizes(self) -> tuple[int, int]:
        return sizes((d.name, d.format, d.dense_bytes, d.packed_bytes) for d in self.sparse)

    def save(self, path: str | os.PathLike[str], profile: "Measured | None" = None) -> None:
        """Writes the report as one HTML file, which any browser shows from disk: the model, the patterns, the code, the run.

        It shows code if the report was made with options={"dump_ir": DIR}, and the run if there is a `profile` of the call.
        Raises OSError if the file cannot be written.
        """
        from gossamer.backend.page.render import render  # most reports are only printed
        from gossamer.backend.page.stages import kernels_in

        kernels = kernels_in(Path(self.dump)) if self.dump else []
        data = self.data() | ({} if profile is None else {"run": profile.data()})
        Path(path).write_text(render(data, kernels, self.dump or ""), encoding="utf-8")

    def data(self) -> dict[str, Any]:
        """Returns the report as data for JSON. Its page shows that data, and a dump folder keeps it."""
        return {
            "training": self.training,
            "min_gain": self.min_gain,
            "decisions": [asdict(decision) for decision in self.decisions],
            "patterns": self.patterns,
            "flows": self.flows,
            "breaks": self.graph_breaks,
            "off": self.off,
            "seconds": self.seconds,
            "dense_bytes": self.dense_bytes,
            "packed_bytes": self.packed_bytes,
            **_counts(self),
            "other": self.other and {"training": self.other.training, **_counts(self.other)},
            "machine": this_machine(),
        }

    def __str__(self) -> str:
        """Returns the mode, a summary, the sparse and the dense weights, and the graph breaks, as text."""
        return _render(self)


def _counts(report: Report) -> dict[str, int]:
    sparse = sum(report.layers.values())
    return {"sparse": sparse, "dense": len(report.layers) - sparse, "kernels": report.kernels}


def _render(report: Report) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(f"gossamer, {_mode(report)}: {_summary(report)}")
    if report.packed_bytes:
        share = report.packed_bytes / report.dense_bytes
        console.print(f"{in_bytes(report.dense_bytes)} of weights packed in {in_bytes(report.packed_bytes)} ({share:.0%})")
    if report.other is not None and (report.other.layers, report.other.kernels) != (report.layers, report.kernels):
        console.print(f"{_HOW[report.other.training]}: {_summary(report.other)}")
    if (advice := _advice(report)) is not None:
        console.print(advice)
    if report.decisions:
        console.print(_table(report.decisions))
    pictures = {decision.picture: decision for decision in report.sparse if decision.picture}
    for picture, decision in pictures.items():
        console.print(f"mask of {decision.name}, computed where it is dark:\n{picture}")
    if report.graph_breaks:
        console.print(f"{count(len(report.graph_breaks), 'graph break')}; no kernel crosses a break:")
        for number, reason in enumerate(report.graph_breaks, 1):
            console.print(f"  {number}. {reason}")
    for sentence in report.off:
        console.print(sentence)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


_HOW = {False: "In inference, that is in eval() mode or under torch.no_grad()", True: "In training, that is in train() mode"}


def _mode(report: Report) -> str:
    return "training" if report.training else "inference"


def _summary(report: Report) -> str:
    """Returns the numbers of sparse and dense weights. A weight with several uses counts once, as sparse if any use is."""
    sparse = sum(report.layers.values())
    return f"{sparse} sparse on {count(report.kernels, 'kernel')}, {len(report.layers) - sparse} left dense"


def _advice(report: Report) -> str | None:
    """Returns advice if nothing became sparse because the model has no zeros. Otherwise returns None."""
    reasons = {decision.reason for decision in report.decisions} - {NO_PRODUCT}
    if not report.decisions:
        return "torch.compile has traced no weight matrix, no mask, no edge list and no SparseTensor."
    if reasons and reasons <= {NO_ZEROS, FEW_ZEROS}:
        return "The model is not pruned. Prune it first, for example by gossamer.prune(model, batches, sparsity=0.8)."
    return None


def _table(decisions: Iterable[Decision]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, width=_WIDTH)
    table.add_column("weight", overflow="fold", min_width=_NAME)
    table.add_column("use", max_width=11)
    table.add_column("shape", no_wrap=True)
    table.add_column("nonzero", justify="right", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("decision", ratio=1)
    groups: dict[object, list[Decision]] = {}
    for decision in decisions:
        groups.setdefault(_kind(decision), []).append(decision)
    for group in groups.values():
        first = group[0]
        name = one_name([d.name for d in group])
        again = f" (x{len(group)})" if len(group) > 1 else ""
        gains = [d.gain for d in group if d.gain is not None]
        reason = one_reason([d.reason for d in group])
        what = f"sparse {_kernel(first)}, {reason}" if first.sparse else f"dense: {reason}"
        table.add_row(
            _wrapped(f"{name}{again}"),
            first.op,
            "x".join(map(str, first.shape)),
            span([d.density for d in group], in_percent, "%") + (f"\n{first.pattern}" if first.pattern else ""),
            span(gains, times, "x"),
            what,
        )
    return table


def _kernel(decision: Decision) -> str:
    """Returns the schedule if the option `schedule` takes it. Otherwise returns the format if it has a short name."""
    schedules, format = (decision.schedule or "").split(", "), str(decision.format)
    named = "(" in format or all(each in SCHEDULES for each in schedules)
    return f"({decision.schedule})" if named else format


def _kind(decision: Decision) -> object:
    """Returns a key. Decisions with equal keys share a row."""
    d = decision
    return without_numbers(d.name), d.op, d.shape, d.sparse, d.format, d.schedule, without_times(d.reason), d.pattern


def _wrapped(name: str) -> str:
    """Breaks a long name after its dots."""
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+$", name):
        if lines[-1].strip() and len(lines[-1]) + len(part) > _NAME:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)
