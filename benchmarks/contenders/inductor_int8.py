"""TorchInductor on the same quantized layers: dense products of int8 by oneDNN (`torch._int_mm`)."""

from __future__ import annotations

from benchmarks.contenders import sparse
from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.quantized import quantized
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    compiled = compiled_alone(quantized(problem))
    return Prepared(lambda: compiled(*problem.inputs))


CONTENDER = Contender("Inductor int8", prepare, precision="int8", missing=sparse.missing)
