"""Gossamer with weights of 4 bits in groups of 16, in a program that replaces no layer and no parameter."""

from __future__ import annotations

from benchmarks.contenders import sparse, sparse_int4
from benchmarks.models import PrunedModel
from benchmarks.quantized import FIXED
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    return sparse_int4.prepare(problem, **FIXED)


CONTENDER = Contender("Gossamer int4, fixed layers", prepare, precision="int4", missing=sparse.missing)
