"""Gossamer on the model quantized by `gossamer.quantize`: another precision, with its errors."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import sparse
from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.quantized import quantized
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel, **options: Any) -> Prepared:
    return sparse.prepared(problem, compiled_alone(quantized(problem), backend="sparse", fullgraph=True, options=options))


CONTENDER = Contender("Gossamer int8", prepare, precision="int8", missing=sparse.missing)
