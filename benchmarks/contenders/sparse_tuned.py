"""Gossamer that measures its schedules instead of predicting them: the option `max_autotune`."""

from __future__ import annotations

from benchmarks.contenders.sparse import missing, prepared
from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    return prepared(problem, compiled_alone(problem.model, backend="sparse", fullgraph=True, options={"max_autotune": True}))


CONTENDER = Contender("Gossamer, tuned", prepare, missing=missing)
