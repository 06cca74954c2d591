"""Gossamer's compiled graph, called without Dynamo's guards around it: what a call costs by itself.

Guards are checked at every call of a compiled model, by any backend. On small models they cost as much as the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.contenders.sparse import missing, noted
from benchmarks.models import PrunedModel
from benchmarks.registry import Contender, Prepared, Unsupported


def prepared(problem: PrunedModel, options: Mapping[str, Any] | None = None) -> Prepared:
    """The graph that `torch.compile(model, backend="sparse", options=options)` makes."""
    from gossamer.backend import sparse
    from gossamer.backend.report.report import collect

    graphs: list[tuple[Callable[..., Sequence[Tensor]], list[Any]]] = []

    def capture(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((sparse(gm, example_inputs, options=options), list(example_inputs)))
        return graphs[-1][0]

    # Every backend that compiles the same code counts as a recompilation of it.
    with collect() as collected, torch._dynamo.config.patch(recompile_limit=100, accumulated_recompile_limit=1000):
        torch.compile(problem.model, backend=capture)(*problem.inputs)
    if len(graphs) != 1:
        raise Unsupported(f"Dynamo made {len(graphs)} graphs of the model, this needs one")
    function, inputs = graphs[0]
    decisions = list(collected.decisions)
    return Prepared(lambda: function(*inputs)[0], lambda: noted(decisions, problem))


def prepare(problem: PrunedModel) -> Prepared:
    return prepared(problem)


CONTENDER = Contender("Gossamer, no guards", prepare, missing=missing)
