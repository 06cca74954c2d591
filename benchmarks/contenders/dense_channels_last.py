"""PyTorch eager with channels innermost in images, as oneDNN likes them."""

from __future__ import annotations

import copy

import torch

from benchmarks.models import PrunedModel, check_images
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    check_images(problem)
    model = copy.deepcopy(problem.model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in problem.inputs]
    return Prepared(lambda: model(*inputs))


CONTENDER = Contender("PyTorch, channels last", prepare)
