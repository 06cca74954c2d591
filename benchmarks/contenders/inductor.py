"""TorchInductor as `torch.compile(model)` gives it: the dense compiler that we build on."""

from __future__ import annotations

import torch

from benchmarks.models import PrunedModel
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    compiled = torch.compile(problem.model)
    return Prepared(lambda: compiled(*problem.inputs))


CONTENDER = Contender("Inductor", prepare)
