"""TorchInductor with freezing: weights are constants, batch norms are folded into them, and they are packed for oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from benchmarks.models import PrunedModel, check_images
from benchmarks.registry import Contender, Prepared


def frozen(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor by another name: under its own, Dynamo would take what it compiled for another contender, not frozen."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(module, inputs)
    return compiled


def prepare(problem: PrunedModel) -> Prepared:
    from torch._inductor import config

    check_images(problem)
    compiled = torch.compile(problem.model, backend=frozen)
    with config.patch(freezing=True):  # Dynamo asks it, too
        compiled(*problem.inputs)
    return Prepared(lambda: compiled(*problem.inputs))


CONTENDER = Contender("Inductor, frozen", prepare)
