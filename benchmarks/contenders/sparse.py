"""Gossamer: `torch.compile(model, backend="sparse")`, with what its decisions say about the regions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.registry import Contender, Prepared, Problem

if TYPE_CHECKING:
    from gossamer import Decision


def missing() -> str | None:
    try:
        import gossamer  # noqa: F401
    except ModuleNotFoundError as error:
        return f"no module '{error.name}'; install Gossamer: pip install -e ."
    if "sparse" not in torch._dynamo.list_backends(exclude_tags=()):
        return "torch.compile does not know the backend 'sparse'; install Gossamer: pip install -e ."
    return None


def grouped(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """The decisions as JSON; those that differ in the name and a little in density and gain are one, with their number."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for found in decisions:
        layer = {
            "op": found.op,
            "shape": "x".join(map(str, found.shape)),
            "density": round(found.density, 2),
            "format": found.format,
            "schedule": found.schedule,
            "sparse": found.sparse,
            "reason": found.reason,
            "gain": found.gain and float(f"{found.gain:.2g}"),
        }
        groups.setdefault(tuple(layer.values()), layer | {"count": 0})["count"] += 1
    return list(groups.values())


def noted(decisions: Sequence[Decision], problem: Problem) -> dict[str, Any]:
    """What was made sparse and how; the bytes of the packed weights, and of the weights that the model holds densely."""
    from gossamer.runtime.packing import Packed

    dense = sum(
        p.nbytes for module in problem.model.modules() if isinstance(module, torch.nn.Linear) for p in module.parameters()
    )
    sparse = [found for found in decisions if found.sparse]
    packed = [found for found in gc.get_objects() if type(found) is Packed]
    itemsize = next(problem.model.parameters()).element_size()
    replaced = itemsize * sum(torch.Size(found.shape).numel() for found in sparse)
    packed_bytes = sum(found.nbytes for found in packed) if sparse else 0
    return {
        "contractions": len(decisions),
        "sparse": len(sparse),
        "layers": grouped(decisions),
        "packed_bytes": packed_bytes,
        "replaced_bytes": replaced,
        "weight_bytes": dense - replaced + packed_bytes,
    }


def prepared(problem: Problem, compiled: Callable[..., Any]) -> Prepared:
    """Compiles by a first call. RuntimeError if the backend was not asked about any weight."""
    from gossamer.backend.report import collect

    with collect() as collected:
        compiled(*problem.inputs)
    if not collected.decisions:
        raise RuntimeError("the backend has seen no weight with zeros: nothing was compiled by it")
    decisions = list(collected.decisions)

    def call() -> Tensor:
        result: Tensor = compiled(*problem.inputs)
        return result

    return Prepared(call, lambda: noted(decisions, problem))


def prepare(problem: Problem) -> Prepared:
    return prepared(problem, torch.compile(problem.model, backend="sparse", fullgraph=True))


CONTENDER = Contender("Gossamer", prepare, missing=missing)
