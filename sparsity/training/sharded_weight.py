"""A layer under a recipe whose weight is a DTensor: each process has a part of it (FSDP2, tensor parallelism) and of its mask.

layer.mask = mask    →    every process keeps its part, without a message
layer.mask           →    the whole one, gathered from all

Masks are made of whole weights and gradients, gathered a layer at a time, so that they are those of a single process.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gossamer.runtime.packers.nonzeros import nonzero_mask
from gossamer.sparsity.training.masked import Masked


class ShardedWeight(Masked):
    """A layer, its weight in parts, and its mask in the same parts."""

    parameter: DTensor  # type: ignore[assignment]
    _part: DTensor

    def __init__(self, name: str, module: nn.Module, parameter: DTensor) -> None:
        self.parameter = parameter
        kept = nonzero_mask(self.whole(self.parameter.detach()))
        super().__init__(name, module, self.parameter, kept)  # type: ignore[arg-type]

    @property
    def mask(self) -> Tensor:
        """Of the whole weight, on every process."""
        return self.whole(self._part)

    @mask.setter
    def mask(self, mask: Tensor) -> None:
        self._part = self.part(mask)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, tensor: Tensor) -> DTensor:
        """A tensor that all processes have, in the parts of the weight."""
        return distribute_tensor(tensor, self.parameter.device_mesh, self.parameter.placements, src_data_rank=None)

    def weight(self) -> Tensor:
        return self.whole(self.parameter.detach())

    def restrict(self, tensor: Tensor) -> None:
        tensor.mul_(self._part)

    def keep(self, squares: Tensor | None) -> None:
        self.squares = None if squares is None else self.part(squares)

    def see(self, gradient: Tensor) -> None:
        """Takes note of a gradient that has been accumulated, of what is pruned that of the last pass alone."""
        if self.dense is None or not bool(self.whole(self.dense).isfinite().all()):
            self.dense = gradient.clone()
        else:
            self.dense = torch.where(self._part, gradient, self.dense + gradient)
