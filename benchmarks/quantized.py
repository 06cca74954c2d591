"""Pruned models with linear layers in int8, or with weights of 4 bits, for the contenders that compute so."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from benchmarks.models import PrunedModel
from benchmarks.registry import Unsupported

FIXED: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
"""Options of a program that replaces no layer and no parameter: Dynamo does not look for that at every call."""


def quantized(problem: PrunedModel) -> nn.Module:
    """A copy of the model whose sparse layers are gossamer's `QuantizedLinear`: a step for each token, found at every call."""
    import gossamer

    check(problem)
    return gossamer.quantize(copy.deepcopy(problem.model))


def check(problem: PrunedModel, precision: str = "int8") -> None:
    """Unsupported where this precision is not asked for, or the model is not float32."""
    if problem.precision != "f32" or precision not in problem.tolerance:
        raise Unsupported(f"no {precision} of this problem")
