"""Times the compiled graphs of a model, the operations in them, their machine code, and their packing of weights."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from gossamer.runtime.watching.calls import Function, Kind


@dataclass(slots=True)
class Call:
    """One call of an operation: when it began and ended, and how long machine code and packing took in it; in nanoseconds."""

    operation: str
    start: int
    end: int = 0
    kernel: int = 0
    packing: int = 0


@dataclass
class Round:
    """One call of the model; all times are in nanoseconds.

    start    when the call began
    forward  when its forward pass ended
    end      when its backward pass ended, if there is one
    graphs   time in the compiled graphs of the forward pass
    """

    start: int = 0
    forward: int = 0
    end: int = 0
    graphs: int = 0
    calls: list[Call] = field(default_factory=list)


Seen = Callable[[str, tuple[Any, ...], Any], None]
"""Called with the name of an operation, its arguments, and its result."""


class Clock:
    """Times the calls of one thread. Pass `wrap` to `watching`.

    seen  called after each operation; None while times matter
    """

    def __init__(self) -> None:
        self.round = Round()
        self.seen: Seen | None = None
        self._thread, self._open, self._depth = threading.get_ident(), Call("", 0), 0
        self._outside = self._open

    def wrap(self, kind: Kind, name: str, function: Function) -> Function:
        """Returns the function with a clock around it."""
        return self._operation(name, function) if kind == "operation" else self._inside(kind, function)

    def graph(self, function: Function) -> Function:
        """Returns a compiled graph with a clock around it."""

        def timed(*given: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return function(*given)
            self._depth, start = 1, perf_counter_ns()
            try:
                return function(*given)
            finally:
                self.round.graphs += perf_counter_ns() - start
                self._depth = 0

        return timed

    def _operation(self, name: str, function: Function) -> Function:
        def timed(*given: Any) -> Any:
            if self._open is not self._outside or threading.get_ident() != self._thread:
                return function(*given)
            self._open = call = Call(name, perf_counter_ns())
            try:
                result = function(*given)
            finally:
                call.end = perf_counter_ns()
                self._open = self._outside
            self.round.calls.append(call)
            if self.seen is not None:
                self.seen(name, given, result)
            return result

        return timed

    def _inside(self, kind: Kind, function: Function) -> Function:
        def timed(*given: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*given)
            call, start = self._open, perf_counter_ns()
            kernels = call.kernel
            try:
                return function(*given)
            finally:
                taken = perf_counter_ns() - start
                if kind == "kernel":
                    call.kernel += taken
                else:  # kernels that run while packing count as packing
                    call.packing, call.kernel = call.packing + taken, kernels

        return timed
