"""TorchInductor on the model converted to bfloat16: another precision, with its errors."""

from __future__ import annotations

import copy

from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.registry import Contender, Prepared, Unsupported


def prepare(problem: PrunedModel) -> Prepared:
    if problem.precision == "bf16":
        raise Unsupported("the model is bf16 by itself: see inductor")
    compiled = compiled_alone(copy.deepcopy(problem.model).bfloat16())
    inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in problem.inputs)
    return Prepared(lambda: compiled(*inputs))


CONTENDER = Contender("Inductor bf16", prepare, precision="bf16")
