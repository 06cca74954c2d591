"""Gossamer on the model whose sparse layers have groups of 16 weights of 4 bits, kept or dropped."""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.contenders import sparse
from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.quantized import check
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel, **options: Any) -> Prepared:
    import gossamer

    check(problem, "int4")
    model = gossamer.quantize(copy.deepcopy(problem.model), weights="int4", group=16)
    return sparse.prepared(problem, compiled_alone(model, backend="sparse", fullgraph=True, options=options))


CONTENDER = Contender("Gossamer int4", prepare, precision="int4", missing=sparse.missing)
