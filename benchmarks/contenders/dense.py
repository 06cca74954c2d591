"""Dense eager PyTorch: what every user has before doing anything."""

from __future__ import annotations

from benchmarks.registry import Contender, Prepared, Problem


def prepare(problem: Problem) -> Prepared:
    return Prepared(lambda: problem.model(*problem.inputs))


CONTENDER = Contender("PyTorch eager", prepare)
