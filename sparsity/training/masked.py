"""A layer and its mask, while a recipe is at work."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.sparsity.pruning.choose_layers import is_transposed
from gossamer.sparsity.torch_functions.open_experts import expert_weights
from gossamer.sparsity.training.latent import BackwardMask, LatentWeight


@dataclass(eq=False)
class Masked:
    """A layer and its mask; tensors are of the weight's shape.

    parameter  what trains: the weight, or what is beneath its mask
    first      the sparsity it came with
    squares    the mean over steps of (w g)^2 or g^2, where the recipe asks for it
    dense      the gradient of all elements, pruned ones too, where they are about to grow
    """

    name: str
    module: nn.Module
    parameter: nn.Parameter
    mask: Tensor
    weight_name: str = "weight"
    first: float = 0.0
    squares: Tensor | None = None
    dense: Tensor | None = None
    latent: LatentWeight | None = None
    back: BackwardMask | None = None

    @property
    def density(self) -> float:
        """The share of elements that the mask keeps."""
        return count_nonzeros(self.mask) / self.mask.numel()

    def matrix(self, tensor: Tensor) -> Tensor:
        """[outputs, inputs] of a tensor of the weight's shape; of experts [experts x outputs, inputs]."""
        if expert_weights(self.module):
            return (tensor.mT if self.module.is_transposed else tensor).flatten(0, 1)
        return tensor.t() if is_transposed(self.module) else tensor.flatten(1)

    def unfolded(self, matrix: Tensor) -> Tensor:
        """The tensor of the weight's shape of a matrix."""
        if expert_weights(self.module) and self.module.is_transposed:
            return matrix.view(len(self.parameter), -1, matrix.shape[1]).mT
        return matrix.t() if is_transposed(self.module) else matrix.view(self.parameter.shape)

    def weight(self) -> Tensor:
        """The weight, pruned elements too."""
        return self.parameter.detach()

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape, of which this process may have a part."""
        return tensor

    def set_to_zero(self) -> None:
        """Makes what is pruned zero."""
        self.restrict(self.parameter)

    def restrict(self, tensor: Tensor) -> None:
        """Makes a tensor of the weight's shape zero where the weight is pruned."""
        tensor.mul_(self.mask)

    def keep(self, squares: Tensor | None) -> None:
        """Takes over squares that were saved."""
        self.squares = squares

    def see(self, gradient: Tensor) -> None:
        """Takes note of a gradient of all elements: it is added to those of the same step."""
        fresh = self.dense is None or self.parameter.grad is None or not bool(self.dense.isfinite().all())
        self.dense = gradient.detach().clone() if fresh or self.dense is None else self.dense.add_(gradient)

    def seen(self) -> Tensor:
        """The gradient of which it took note; zeros where none has come."""
        return torch.zeros_like(self.mask, dtype=self.parameter.dtype) if self.dense is None else self.dense

    @property
    def sizes(self) -> tuple[int, ...]:
        """Outputs x inputs x sides of the kernel."""
        shape = tuple(self.parameter.shape)
        return shape[::-1] if is_transposed(self.module) else shape
