"""Counts the writes of fused optimizers to parameters, because torch 2.13 does not. Packed weights depend on that count.

AdamW(fused=True).step()    →    each parameter's `_version` increases, as with every other optimizer
"""

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Counts a write to each parameter of the groups that are fused."""
    if torch.compiler.is_compiling():
        return  # torch counts the writes of compiled steps
    fused = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"] if p.grad is not None]
    if fused:
        torch.autograd.graph.increment_version(fused)


def count_writes() -> None:
    """Makes all optimizers of this process count their writes. Further calls do nothing."""
    global _counted
    if not _counted:
        register_optimizer_step_post_hook(_count)
        _counted = True


_counted = False
