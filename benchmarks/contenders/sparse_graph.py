"""Gossamer's compiled graph, called without Dynamo's guards around it: what a call costs by itself.

Guards are checked at every call of a compiled model, by any backend. On small models they cost as much as the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.contenders.sparse import missing
from benchmarks.registry import Contender, Prepared, Problem, Unsupported


def prepare(problem: Problem) -> Prepared:
    from gossamer.backend import sparse

    graphs: list[tuple[Callable[..., Sequence[Tensor]], list[Any]]] = []

    def capture(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((sparse(gm, example_inputs), list(example_inputs)))
        return graphs[-1][0]

    torch.compile(problem.model, backend=capture)(*problem.inputs)
    if len(graphs) != 1:
        raise Unsupported(f"Dynamo made {len(graphs)} graphs of the model, this needs one")
    function, inputs = graphs[0]
    return Prepared(lambda: function(*inputs)[0])


CONTENDER = Contender("Gossamer, no guards", prepare, missing=missing)
