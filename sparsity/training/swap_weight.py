"""Swaps a plain weight under a recipe for one that stores only its nonzeros, in its module and its optimizer, and back.

layer.weight = Parameter(dense), mask      →    layer.weight = Parameter(SparseTensor), with the optimizer's state
                                           ←    when training ends: the plain parameter is the same object as before
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.sparsity.pruning.stored_layers import FORMAT
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, from_entries
from gossamer.sparsity.training.first_values import first_value
from gossamer.sparsity.training.masked import Masked
from gossamer.sparsity.training.stored_weight import StoredWeight


@torch.no_grad()
def store_weight(layer: Masked, optimizer: Optimizer) -> StoredWeight:
    """Makes module and optimizer train a stored weight of the kept elements. The plain parameter is empty meanwhile."""
    plain, at = layer.parameter, layer.mask.nonzero().unbind(1)
    made = nn.Parameter(from_entries(FORMAT, tuple(plain.shape), at, plain.detach()[at]), plain.requires_grad)
    pattern, shape = made.detach(), plain.shape
    sampled = lambda tensor: tensor if isinstance(tensor, SparseTensor) else tensor.sparse_mask(pattern)
    if plain.grad is not None:
        made.grad, plain.grad = sampled(plain.grad), None
    plain.data = plain.new_empty(0)
    _put(layer.module, optimizer, plain, made)
    _pass_on(optimizer, made, shape, lambda _, tensor: sampled(tensor))
    return StoredWeight(layer.name, layer.module, optimizer, layer)


@torch.no_grad()
def unstore_weight(layer: StoredWeight) -> Masked:
    """Makes module and optimizer train the plain parameter again, with zeros."""
    masked, stored = layer.plain, layer.parameter
    assert masked is not None, "it came as a stored one"
    masked.mask, plain, optimizer = layer.mask, masked.parameter, layer.optimizer
    plain.data = stored.detach().to_dense()
    plain.requires_grad_(stored.requires_grad)
    plain.grad = None if stored.grad is None else stored.grad.to_dense()
    _put(layer.module, optimizer, stored, plain)
    dense = lambda name, tensor: torch.where(masked.mask, tensor.to_dense(), first_value(optimizer, plain, name))
    _pass_on(optimizer, plain, plain.shape, dense)
    return masked


def _put(module: nn.Module, optimizer: Optimizer, old: Tensor, new: Tensor) -> None:
    module._parameters["weight"] = new  # type: ignore[assignment]
    for group in optimizer.param_groups:
        group["params"][:] = [new if each is old else each for each in group["params"]]  # an optimizer may hold the list
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


def _pass_on(optimizer: Optimizer, parameter: Tensor, shape: torch.Size, through: Callable[[str, Tensor], Tensor]) -> None:
    """Applies a function to the tensors of an optimizer's state that have the weight's shape, and their names."""
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            state[name] = through(name, value)
