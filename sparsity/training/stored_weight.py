"""A layer under a recipe whose weight stores its nonzeros alone (see store_sparse.py): its mask is the pattern of the weight.

layer.mask = mask    →    weight, gradient and what the optimizer remembers have that pattern; nonzeros that are new are 0

The gradient of what is not stored is known where a module computes with a dense weight. For a step it does: by the `forward` of
a copy that has one, which hands over its gradient. Optimizers and state dicts see the stored weight meanwhile.
"""

from collections.abc import Iterator
from copy import copy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.sparsity.calls.in_place import overwrite
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, from_entries
from gossamer.sparsity.training.masked import Masked


class StoredWeight(Masked):
    """A layer, its stored weight, and the optimizer that remembers something of it.

    plain  the layer with a plain weight, whose place this one has, if it did not come as it is
    """

    parameter: SparseTensor  # type: ignore[assignment]

    def __init__(self, name: str, module: nn.Module, optimizer: Optimizer, plain: Masked | None = None) -> None:
        self.parameter: SparseTensor = module._parameters["weight"]  # type: ignore[assignment]
        super().__init__(name, module, self.parameter, self.mask)  # type: ignore[arg-type]
        self.first = 1 - self.density if plain is None else plain.first
        self.optimizer, self.plain = optimizer, plain

    @property
    def mask(self) -> Tensor:
        """Where something is stored."""
        weight = self.parameter
        *structure, values = weight.components
        return SparseTensor(weight.format, weight.shape, (*structure, torch.ones_like(values))).to_dense() != 0

    @mask.setter
    @torch.no_grad()
    def mask(self, mask: Tensor) -> None:
        weight = self.parameter
        if torch.equal(mask, self.mask):
            return
        at = mask.nonzero().unbind(1)
        pattern = from_entries(weight.format, tuple(weight.shape), at, weight.components[-1].new_ones(len(at[0])))
        for tensor in self._of_its_pattern():
            overwrite("mask", tensor, tensor.detach().to_dense().sparse_mask(pattern))

    @property
    def density(self) -> float:
        return self.parameter.nnz / self.parameter.numel()

    def _of_its_pattern(self) -> Iterator[SparseTensor]:
        state = self.optimizer.state.get(self.parameter, {}).values()
        for tensor in (self.parameter, self.parameter.grad, *state):
            if isinstance(tensor, SparseTensor):
                yield tensor

    def weight(self) -> Tensor:
        return self.parameter.detach().to_dense()

    def set_to_zero(self) -> None:
        """Nothing: what is pruned is not there."""

    def lend(self) -> None:
        """Has the module compute with a dense weight, until `take_back`."""
        leaf = nn.Parameter(self.weight())
        leaf.register_post_accumulate_grad_hook(self._hand_over)
        other = copy(self.module)
        other._parameters = {**self.module._parameters, "weight": leaf}
        self.module.forward = other.forward

    def take_back(self) -> None:
        """Has it compute with the stored one again."""
        self.module.__dict__.pop("forward", None)

    @torch.no_grad()
    def _hand_over(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient, leaf.grad = leaf.grad, None
        own = gradient.sparse_mask(self.parameter.detach())
        self.see(gradient)
        if self.parameter.grad is None:
            self.parameter.grad = own
        else:
            self.parameter.grad.add_(own)
        for hook in (self.parameter._post_accumulate_grad_hooks or {}).values():
            hook(self.parameter)
