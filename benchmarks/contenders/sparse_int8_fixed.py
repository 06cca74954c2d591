"""Gossamer on the model quantized by `gossamer.quantize`, in a program that replaces no layer and no parameter."""

from __future__ import annotations

from benchmarks.contenders import sparse, sparse_int8
from benchmarks.models import PrunedModel
from benchmarks.quantized import FIXED
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    return sparse_int8.prepare(problem, **FIXED)


CONTENDER = Contender("Gossamer int8, fixed layers", prepare, precision="int8", missing=sparse.missing)
