"""The interface of a graph pass. `backend/graph_passes.py` lists all passes in their order."""

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from gossamer.backend.devices.budget import Budget
from gossamer.backend.graph.inputs import Inputs
from gossamer.backend.graph.refused import Refused
from gossamer.backend.report.dump import Dump
from gossamer.backend.report.options import Options
from gossamer.backend.report.report import FAILED, Decision
from gossamer.dialects.errors import CompileError


@dataclass(frozen=True, eq=False)
class GraphContext:
    """What graph passes know besides the graph.

    inputs     the real inputs that Dynamo gave
    options    the user's
    dump       where stages are written to, None if nowhere
    measuring  what is measured, and for how long; None where predictions decide
    exported   whether the graph is for processes without Gossamer, which have kernels and no more of it
    """

    inputs: Inputs
    options: Options
    dump: Dump | None
    measuring: Budget | None
    exported: bool = False

    def reason(self, problem: Refused | CompileError) -> str:
        """Why something stays as it is. What failed to compile is raised under `strict`."""
        if isinstance(problem, Refused):
            return str(problem)
        if self.options.strict:
            raise problem
        return FAILED


class GraphPass(Protocol):
    """A rewriting of an inference or joint graph."""

    def run(self, graph: fx.Graph, context: GraphContext) -> list[Decision]:
        """Rewrites the graph in place, its nodes' `meta["val"]` kept right; what was decided, for the report.

        What fails to compile warns and stays as it was, or is raised under `strict`. Whatever else is raised is a bug: the
        graph goes on as if there were no such pass.
        """
        ...
