"""Gossamer as the README calls it: in eval mode, with gradients enabled."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders.sparse import missing, prepared
from benchmarks.models import PrunedModel
from benchmarks.own_code import compiled as compiled_alone
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    compiled = compiled_alone(problem.model.requires_grad_(), backend="sparse", fullgraph=True)

    def with_gradients(*inputs: Any) -> Any:
        with torch.enable_grad():
            return compiled(*inputs)

    return prepared(problem, with_gradients)


CONTENDER = Contender("Gossamer, gradients on", prepare, missing=missing)
