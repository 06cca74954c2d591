"""`ShardedWeight` is a layer under a recipe whose weight is a DTensor: each process has a part of weight and mask.

layer.mask = mask    →    every process keeps its part, without communication
layer.mask           →    the whole mask, gathered from all processes

FSDP2 and tensor parallelism make such weights. Masks are computed from whole weights and gradients, gathered one layer at a
time, so they equal those of a single process.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gossamer.runtime.packers.nonzeros import nonzero_mask
from gossamer.sparsity.training.masked import Masked


class ShardedWeight(Masked):
    """A layer whose weight and mask are in the same parts."""

    parameter: DTensor  # type: ignore[assignment]
    _part: DTensor

    def __init__(self, name: str, module: nn.Module, parameter: DTensor) -> None:
        self.parameter = parameter
        kept = nonzero_mask(self.whole(self.parameter.detach()))
        super().__init__(name, module, self.parameter, kept)  # type: ignore[arg-type]
        self._accumulated: Callable[[], Tensor | None] = lambda: None

    @property
    def mask(self) -> Tensor:
        """The mask of the whole weight, on every process."""
        return self.whole(self._part)

    @mask.setter
    def mask(self, mask: Tensor) -> None:
        self._part = self.part(mask)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor) -> DTensor:
        """Returns a tensor that all processes have, distributed like the weight."""
        return distribute_tensor(tensor, self.parameter.device_mesh, self.parameter.placements, src_data_rank=None)

    def weight(self) -> Tensor:
        return self.whole(self.parameter.detach())

    @property
    def own_mask(self) -> Tensor:
        return self._part

    def keep(self, squares: Tensor | None) -> None:
        self.squares = None if squares is None else self.part(squares)

    def see(self, gradient: Tensor) -> None:
        """Takes an accumulated gradient. At pruned elements it holds only the last pass, so these are added up here."""
        super().see(gradient)
        self._accumulated = weakref.ref(gradient)

    def add(self, gradient: Tensor) -> None:
        self.dense = gradient.clone() if self.dense is None else torch.where(self._part, gradient, self.dense + gradient)

    def _is_discarded(self, dense: Tensor) -> bool:
        """Whether the gradient is in a new tensor. After the fact, nobody can tell if the old tensor was zero before."""
        return self._accumulated() is not self.parameter.grad
