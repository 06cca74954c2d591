"""Dense eager PyTorch: what every user has before doing anything."""

from __future__ import annotations

from benchmarks.models import PrunedModel
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    return Prepared(lambda: problem.model(*problem.inputs))


CONTENDER = Contender("PyTorch eager", prepare)
