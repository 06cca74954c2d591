"""What a weight is going to be when its training is through: plans are made for that.

A weight of "gradual" to 90 % is dense at its first step. Compiled as one, it would stay dense for ever.
"""

from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor


class Foresees(Protocol):
    """What trains weights."""

    def foresee(self, tensor: Tensor) -> Tensor | None:
        """What becomes of a tensor, of its class; None for one that is not trained here."""


at_work: WeakSet[Foresees] = WeakSet()


@torch.no_grad()
def foreseen(tensor: Tensor) -> Tensor:
    """What a plan for a tensor is to be made for: itself, if nobody knows better."""
    for each in at_work:
        if (found := each.foresee(tensor)) is not None:
            return found
    return tensor


@torch.no_grad()
def is_in_training(tensor: Tensor) -> bool:
    """Whether somebody foresees what becomes of a tensor, and so tells when to compile anew."""
    return any(each.foresee(tensor) is not None for each in at_work)
