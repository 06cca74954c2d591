"""Gossamer that measures its schedules instead of predicting them: the option `max_autotune`."""

from __future__ import annotations

import torch

from benchmarks.contenders.sparse import missing, prepared
from benchmarks.models import PrunedModel
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    return prepared(problem, torch.compile(problem.model, backend="sparse", fullgraph=True, options={"max_autotune": True}))


CONTENDER = Contender("Gossamer, tuned", prepare, missing=missing)
