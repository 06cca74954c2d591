"""OpenVINO that computes in bfloat16, from float32 weights, inputs and outputs."""

from __future__ import annotations

from benchmarks.contenders.openvino import missing, prepared
from benchmarks.models import PrunedModel
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    return prepared(problem, "bf16")


CONTENDER = Contender("OpenVINO bf16", prepare, precision="bf16", own_threads=True, missing=missing)
