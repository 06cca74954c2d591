"""A network whose pruned weights lose their zeros while it is compiled: from then on, is it as fast as if it had never had any?

mlp      1024 -> 4096 -> 1024 with gelu, for a batch of 128
convnet  four convolutions of 3 x 3 with batch norms, for 4 images of 56 x 56

Gossamer compiles the network with 90 % zeros and calls it. Then weights without zeros are loaded into it. The timing begins a
hundred calls later. The other contenders never see a zero.
"""

from __future__ import annotations

import copy
from argparse import Namespace, _ActionsContainer
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from benchmarks.arguments import add_list, some_of
from benchmarks.contenders.sparse import missing
from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled
from benchmarks.pruning import prune
from benchmarks.registry import Case, Contender, Prepared, Workload, contender

_SPARSITY, _CALLS = 0.9, 100
_TOLERANCE = {"f32": 1e-4}


def mlp() -> PrunedModel:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).eval()
    return PrunedModel(model, (torch.randn(128, 1024),), _TOLERANCE)


def convnet() -> PrunedModel:
    widths = [64, 128, 128, 256, 256]
    layers = [
        part
        for inputs, outputs in pairwise(widths)
        for part in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    return PrunedModel(nn.Sequential(*layers).eval(), (torch.randn(4, 64, 56, 56),), _TOLERANCE)


MODELS = {"mlp": mlp, "convnet": convnet}


def build(name: str) -> PrunedModel:
    torch.manual_seed(0)
    return MODELS[name]()


def prepare(problem: PrunedModel) -> Prepared:
    """Compiles with zeros, and gives the weights back. RuntimeError if nothing was sparse before."""
    from gossamer.backend.report.report import collect

    model = copy.deepcopy(problem.model)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            prune(module.weight.detach().flatten(1), "unstructured", _SPARSITY)
    call = compiled(model, backend="sparse", fullgraph=True)
    with collect() as collected:
        for _ in range(_CALLS):
            call(*problem.inputs)
    before = sum(decision.sparse for decision in collected.decisions)
    if not before:
        raise RuntimeError("nothing was sparse, so nothing can become dense again")
    model.load_state_dict(problem.model.state_dict())
    with collect() as collected:
        for _ in range(_CALLS):
            call(*problem.inputs)
    after = sum(decision.sparse for decision in collected.decisions)
    return Prepared(lambda: call(*problem.inputs), lambda: {"sparse_before": before, "sparse_after": after})


def contenders() -> dict[str, Contender]:
    ours = Contender("Gossamer, its zeros lost", prepare, missing=missing)
    return {"dense": contender("dense"), "inductor": contender("inductor"), "sparse": ours}


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--models", some_of(*MODELS), ",".join(MODELS), "of which")


def cases(args: Namespace) -> list[Case]:
    return [Case(name, {"model": name}, partial(build, name), 4.0) for name in args.models]


WORKLOAD = Workload("a network whose weights lost their zeros", add_arguments, cases, contenders, preparing=15.0)
