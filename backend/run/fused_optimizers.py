"""Fused optimizers write to parameters without counting it (torch 2.13), and packed weights go by that count: it is done here.

AdamW(fused=True).step()    →    each parameter's `_version` moves on, as with every other optimizer
"""

from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Counts a write to each parameter of the groups that are fused."""
    if torch.compiler.is_compiling():
        return  # compiled steps write by operations that are counted
    fused = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"] if p.grad is not None]
    if fused:
        torch.autograd.graph.increment_version(fused)


def count_writes() -> None:
    """Makes all optimizers count, from now on; once a process."""
    global _counted
    if not _counted:
        register_optimizer_step_post_hook(_count)
        _counted = True


_counted = False
