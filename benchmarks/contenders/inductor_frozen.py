"""TorchInductor with freezing: weights are constants, batch norms are folded into them, and they are packed for oneDNN."""

from __future__ import annotations

import torch

from benchmarks.models import PrunedModel, check_images
from benchmarks.registry import Contender, Prepared


def prepare(problem: PrunedModel) -> Prepared:
    import torch._inductor.config as inductor_config

    check_images(problem)
    compiled = torch.compile(problem.model)
    with inductor_config.patch(freezing=True):
        compiled(*problem.inputs)
    return Prepared(lambda: compiled(*problem.inputs))


CONTENDER = Contender("Inductor, frozen", prepare)
