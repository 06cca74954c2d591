"""Foresees what a weight will be at the end of its training. Plans are made for that weight.

A weight under "gradual" pruning to 90 % is dense at its first step. A plan for the dense weight would leave it dense forever.
"""

from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor


class Foresees(Protocol):
    """A method of training that knows how sparse its weights will be."""

    def foresee(self, tensor: Tensor) -> Tensor | None:
        """Returns what the tensor will become, as a tensor of the same class; None if this object does not train it."""


at_work: WeakSet[Foresees] = WeakSet()


@torch.no_grad()
def foreseen(tensor: Tensor) -> Tensor:
    """Returns the tensor to make a plan for: what the training will make of it, or itself if nothing trains it."""
    for each in at_work:
        if (found := each.foresee(tensor)) is not None:
            return found
    return tensor


@torch.no_grad()
def is_in_training(tensor: Tensor) -> bool:
    """Whether a method of training foresees the tensor. That method also says when to compile again."""
    return any(each.foresee(tensor) is not None for each in at_work)
