"""Gossamer: `torch.compile(model, backend="sparse")`, with what its report says about the regions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchmarks.registry import Contender, Prepared, Problem


def missing() -> str | None:
    try:
        import gossamer  # noqa: F401
    except ModuleNotFoundError as error:
        return f"no module '{error.name}'; install Gossamer: pip install -e ."
    if "sparse" not in torch._dynamo.list_backends(exclude_tags=()):
        return "torch.compile does not know the backend 'sparse'; install Gossamer: pip install -e ."
    return None


def prepare(problem: Problem) -> Prepared:
    compiled = torch.compile(problem.model, backend="sparse")

    def notes() -> dict[str, Any]:
        """How many contractions were made sparse, with which schedules, and why others stayed dense."""
        import gossamer

        decisions = gossamer.explain(problem.model, *problem.inputs).decisions
        return {
            "contractions": len(decisions),
            "sparse": sum(decision.sparse for decision in decisions),
            "schedules": dict(Counter(decision.schedule for decision in decisions if decision.sparse)),
            "dense_because": dict(Counter(decision.reason for decision in decisions if not decision.sparse)),
        }

    return Prepared(lambda: compiled(*problem.inputs), notes)


CONTENDER = Contender("Gossamer", prepare, missing=missing)
