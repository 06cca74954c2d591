"""Makes torch's optimizers step a parameter and its state in one loop, whatever flags the user gave.

    AdamW(...), by default      a dozen operations, each of which reads and writes whole tensors
    AdamW(..., fused=True)      one loop, with the same results up to rounding

On CPUs, torch runs the first by default. `can_be_one_loop` says whether it can run the second, and `in_one_loop` asks for it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, optim

_FUSED = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad}

_TYPES = (torch.float32, torch.float64)


def can_be_one_loop(kind: type, group: Mapping[str, Any], states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether torch has one loop for a group with these states. The caller checks that all are f32 or f64 on CPUs."""
    if kind not in _FUSED or group.get("capturable") or group.get("differentiable"):
        return False
    if any(isinstance(each, Tensor) for each in (group["lr"], *group.get("betas", ()))):
        return False
    # The loop counts steps in f32. Without it, torch counts them in the default type.
    counts = [state.get("step") for state in states]
    return torch.get_default_dtype() is torch.float32 and all(
        count is None or (isinstance(count, Tensor) and count.dtype is torch.float32) for count in counts
    )


def in_one_loop(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the group with the flags that ask for one loop."""
    return {**group, "fused": True, "foreach": False}


def holds(*tensors: Tensor) -> bool:
    """Whether the loop takes these tensors: f32 or f64, on CPUs."""
    return all(each.is_cpu and each.dtype in _TYPES for each in tensors)
