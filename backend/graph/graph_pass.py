"""The interface of a graph pass. `backend/graph_passes.py` lists all passes, and `backend/compile_graph.py` runs them."""

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from gossamer.backend.devices.budget import Budget
from gossamer.backend.devices.trial import Trial
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.refused import Refused
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError


@dataclass(frozen=True, eq=False)
class GraphContext:
    """The arguments of graph passes besides the graph.

    inputs     the real inputs from Dynamo
    options    the user's options
    dump       writes stages to a folder; None if there is none
    measuring  the time that is left for measurements, and their rules; None if only predictions decide
    trial      decides about convolutions whose predicted gain is close to 1; None if the prediction decides
    exported   whether the graph will run in processes without Gossamer, which can only call kernels
    reads_constants  whether regions may read tensors that tracing has put into the graph; those of Inductor may not
    """

    inputs: Inputs
    options: Options
    dump: Dump | None
    measuring: Budget | None
    trial: Trial | None = None
    exported: bool = False
    reads_constants: bool = True

    def reason(self, problem: Refused | CompileError) -> str:
        """Returns why a part of the graph stays as it is. With the option `strict`, raises a CompileError instead."""
        if isinstance(problem, Refused):
            return str(problem)
        if self.options.strict:
            raise problem
        return FAILED


class GraphPass(Protocol):
    """A rewriting of an inference or joint graph."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Rewrites the graph in place, and keeps `meta["val"]` of its nodes correct. Returns the decisions, for the report.

        If a part fails to compile, the pass warns and leaves it as it was. With the option `strict`, it raises the error. Any
        other error is a bug: `compile_graph` then restores the graph, and runs without this pass.
        """
        ...
