"""TorchInductor as `torch.compile(model)` gives it: the dense compiler that we build on."""

from __future__ import annotations

from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    compiled = compiled_alone(problem.model)
    return Prepared(lambda: compiled(*problem.inputs))


CONTENDER = Contender("Inductor", prepare)
