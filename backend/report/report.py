"""Keeps decisions as data: one `Decision` for each use of a weight.

The log, the report (table.py) and the tests read these records. `record` passes decisions to the log, to torch's counters
(`torch._dynamo.utils.counters["gossamer"]`) and to every `collect` block that is open in this thread.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gossamer.backend.report.details import Details
from gossamer.backend.report.words import in_percent, times
from gossamer.runtime.torch_internals import counters

log = logging.getLogger("gossamer")


FAILED = "it failed to compile"
"""The reason of a Decision if Gossamer's compiler failed."""

NO_ZEROS, FEW_ZEROS = "it has no zeros", "it has hardly any zeros"
"""The reasons of Decisions about weights that are not pruned."""

NO_PRODUCT = "it is looked up or added, not multiplied: zeros save no time"
"""The reason of a Decision about a weight whose pruning would save no time, such as an embedding table."""

_WITHOUT_KERNEL = ("folded", "order")
"""Schedules of sparse decisions that need no kernel, because they save work during the compilation."""


@dataclass(frozen=True)
class Decision:
    """The decision for one use of one weight, and the reason.

    name      name of the weight in the model, such as "encoder.layer.0.attention.self.query.weight"
    op        its use: "linear", "linear backward", "convolution", ...
    shape     of the weight
    density   share of nonzero elements, 0 to 1
    format    storage format of the packed weight; None if it stays dense
    schedule  schedule of its kernel; None if it stays dense
    sparse    whether a sparse kernel runs it
    reason    why, in a few words
    gain      speed-up over dense; None if there is no prediction
    measured  whether the gain was measured; otherwise it is predicted
    dense_bytes, packed_bytes
              bytes of the dense and of the packed weight, for the usual number of tokens; 0 if it stays dense
    picture   picture of a mask, in characters, whose dark parts are computed; empty for other decisions
    kernels   keys of the kernels that run it, if these do not belong to a region
    pattern   pattern of its zeros, such as "2:4"; empty if they are unstructured
    details   the numbers behind the decision, for products with a weight; None for other decisions
    """

    name: str
    op: str
    shape: tuple[int, ...]
    density: float
    format: str | None
    schedule: str | None
    sparse: bool
    reason: str
    gain: float | None
    measured: bool = False
    dense_bytes: int = 0
    packed_bytes: int = 0
    picture: str = ""
    kernels: tuple[str, ...] = ()
    pattern: str = ""
    details: Details | None = field(default=None, compare=False, repr=False)

    @property
    def kernel_keys(self) -> tuple[str, ...]:
        """Keys of its kernels, if these do not belong to a region.

        Operations over edge lists and SparseTensors compile their kernels when they are called. Each such use has one key.
        """
        in_region = self.details is not None or self.packed_bytes > 0
        if self.kernels or in_region or not self.sparse or self.schedule in _WITHOUT_KERNEL:
            return self.kernels
        return (f"{self.op} {self.format} {self.schedule}",)

    @classmethod
    def dense(
        cls, name: str, op: str, shape: Sequence[int], density: float, reason: str, gain: float | None = None,
        measured: bool = False, pattern: str = "", details: Details | None = None,
    ) -> "Decision":  # fmt: skip
        """Returns a Decision that a weight stays dense, with the reason."""
        return cls(name, op, tuple(shape), density, None, None, False, reason, gain, measured, pattern=pattern, details=details)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        what = f"sparse as {self.format} ({self.schedule})" if self.sparse else "dense"
        gain = f", {'measured' if self.measured else 'predicted'} {times(self.gain)}x of dense" if self.gain is not None else ""
        pattern = f" in {self.pattern}" if self.pattern else ""
        return f"{self.name} {shape}, {in_percent(self.density)}% nonzero{pattern}, {self.op}: {what}, {self.reason}{gain}"


@dataclass
class Collector:
    """Receives the arguments of `record` while a `collect` block is open."""

    decisions: list[Decision] = field(default_factory=list)
    kernels: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    training: bool = False
    flows: list[list[dict[str, Any]]] = field(default_factory=list)


_open: ContextVar[tuple[Collector, ...]] = ContextVar("gossamer_collectors", default=())


@contextmanager
def collect() -> Iterator[Collector]:
    """Collects every decision that this thread records inside the block."""
    collector = Collector()
    token = _open.set((*_open.get(), collector))
    try:
        yield collector
    finally:
        _open.reset(token)


_withheld: ContextVar[list[Callable[[], None]] | None] = ContextVar("gossamer_withheld", default=None)


@contextmanager
def withheld() -> Iterator[Callable[[], None]]:
    """Withholds what is recorded in the block. The yielded function publishes it."""
    calls = list[Callable[[], None]]()

    def publish() -> None:
        for call in calls:
            call()

    token = _withheld.set(calls)
    try:
        yield publish
    finally:
        _withheld.reset(token)


def record(
    decisions: Iterable[Decision],
    kernels: Iterable[str],
    seconds: Mapping[str, float],
    training: bool = False,
    graphs: int = 1,
    flow: Callable[[], list[dict[str, Any]]] | None = None,
) -> None:
    """Publishes the decisions about one graph.

    kernels   content keys of the kernels that the graph calls
    seconds   time of each graph pass
    training  whether the graph has gradients
    graphs    1, or 0 if another call publishes decisions about the same graph
    flow      computes the parts of the graph (see flow.py)
    """
    decisions = list(decisions)
    if (calls := _withheld.get()) is not None:
        parts = flow() if flow is not None and _open.get() else None  # now, because the graph changes later
        calls.append(partial(record, decisions, kernels, seconds, training, graphs, None if parts is None else lambda: parts))
        return
    kernels = {*kernels, *(key for decision in decisions for key in decision.kernel_keys)}
    for decision in decisions:
        log.info("%s", decision)
    counters["gossamer"]["graphs"] += graphs
    counters["gossamer"]["regions"] += sum(d.sparse for d in decisions)
    counters["gossamer"]["dense"] += sum(not d.sparse for d in decisions)
    for collector in _open.get():
        collector.decisions += decisions
        collector.kernels |= kernels
        collector.training |= training
        if flow is not None:
            collector.flows.append(flow())
        for name, taken in seconds.items():
            collector.seconds[name] = collector.seconds.get(name, 0.0) + taken


__all__ = ["Collector", "Decision", "collect", "log", "record"]
