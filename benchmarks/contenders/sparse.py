"""Gossamer: `torch.compile(model, backend="sparse")`, with what its decisions say about the regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.registry import Contender, Prepared

if TYPE_CHECKING:
    from gossamer import Decision


def missing() -> str | None:
    try:
        import gossamer  # noqa: F401
    except ModuleNotFoundError as error:
        return f"no module '{error.name}'; install Gossamer: pip install -e ."
    if "sparse" not in torch.compiler.list_backends(exclude_tags=()):
        return "torch.compile does not know the backend 'sparse'; install Gossamer: pip install -e ."
    return None


def chosen(decisions: Sequence[Decision]) -> dict[str, Any]:
    """How many contractions became sparse, and by which schedules."""
    sparse = [found for found in decisions if found.sparse]
    return {"sparse": len(sparse), "schedules": sorted({str(found.schedule) for found in sparse})}


def noted(decisions: Sequence[Decision], problem: PrunedModel) -> dict[str, Any]:
    """What was made sparse and how; the bytes of those weights before and after, and of all weights as they are now."""
    from gossamer import Report

    report = Report(list(decisions))
    linears = [module for module in problem.model.modules() if isinstance(module, torch.nn.Linear)]
    dense = sum(parameter.nbytes for linear in linears for parameter in linear.parameters())
    return {
        **chosen(decisions),
        "dense_bytes": report.dense_bytes,
        "packed_bytes": report.packed_bytes,
        "weight_bytes": dense - report.dense_bytes + report.packed_bytes,
    }


def prepared(problem: PrunedModel, compiled: Callable[..., Any]) -> Prepared:
    """Compiles by a first call. RuntimeError if the backend was not asked about any weight."""
    from gossamer.backend.report.report import collect

    with collect() as collected:
        compiled(*problem.inputs)
    if not collected.decisions:
        raise RuntimeError("the backend has seen no weight with zeros: nothing was compiled by it")
    decisions = list(collected.decisions)

    def call() -> Tensor:
        result: Tensor = compiled(*problem.inputs)
        return result

    return Prepared(call, lambda: noted(decisions, problem))


def prepare(problem: PrunedModel) -> Prepared:
    return prepared(problem, compiled_alone(problem.model, backend="sparse", fullgraph=True))  # a graph break is an error


CONTENDER = Contender("Gossamer", prepare, missing=missing)
