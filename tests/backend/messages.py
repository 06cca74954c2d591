"""Edge lists, and what is compared of models that pass messages along them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.backend.harness import Run, compile_and_run

NODES, EDGES = 60, 400


def edges(nodes: int = NODES, count: int = EDGES) -> Tensor:
    """Random edges, with self loops, parallel edges, and a node that has none."""
    found = torch.randint(0, nodes - 1, (2, count))
    found[:, 1] = found[:, 0]
    return found


def operations(run: Run) -> list[str]:
    """What was recognised, without the linear layers around it."""
    return sorted(d.op for d in run.regions if "linear" not in d.op)


def trained(layer: nn.Module, *inputs: Tensor, **options: Any) -> tuple[Run, list[Tensor], list[Tensor]]:
    """The compiled layer after a backward pass: the gradients of its parameters and inputs, ours and eager torch's."""
    both = []
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    own = copy.deepcopy(layer)
    run = compile_and_run(own, *given, grad=True, **options)
    weights = torch.linspace(-1, 1, run.output.numel()).view_as(run.output)
    for model, output, leaves in ((own, run.output, given), (layer, None, [x.detach().clone() for x in given])):
        if output is None:
            leaves = [x.requires_grad_(x.is_floating_point()) for x in leaves]
            output = model(*leaves)
        (output * weights).sum().backward()
        both.append([p.grad for p in (*leaves, *model.parameters()) if p.grad is not None])
    return run, both[0], both[1]


def aggregated(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, index[1], x[index[0]])
