"""Finds layers whose weights are SparseTensor parameters (see store_sparse.py), and makes them dense again."""

from torch import nn

from gossamer.dialects.format import Format
from gossamer.sparsity.pruning.stored_experts import StoredExperts, stored_names
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

FORMAT = Format.CSR.with_widths(32, 32)
"""The format of stored weights: CSR with 32-bit positions and coordinates."""

DENSEST = 0.5
"""The density above which a training step costs as much as a dense one."""


def is_stored(layer: nn.Module) -> bool:
    """Whether a layer's weights store only their nonzeros."""
    return bool(stored_parameters(layer))


def stored_parameters(layer: nn.Module) -> list[str]:
    """Returns the names of the stored weights of a linear layer or of experts."""
    return ["weight"] if isinstance(layer._parameters.get("weight"), SparseTensor) else stored_names(layer)


def make_dense(model: nn.Module) -> None:
    """Makes the stored weights of linear layers and experts dense parameters with zeros, in place. Shared ones stay shared.

    Those of which each process has a part become DTensors.
    """
    made: dict[int, nn.Parameter] = {}

    def dense(weight: nn.Parameter) -> nn.Parameter:
        if id(weight) not in made:
            plain, dealt = weight.detach().to_dense(), weight._dealt if isinstance(weight, SparseTensor) else None
            made[id(weight)] = nn.Parameter(plain if dealt is None else dealt.as_dtensor(plain), weight.requires_grad)
        return made[id(weight)]

    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if isinstance(layer, StoredExperts):
            layer.become_plain(dense)
        elif isinstance(layer, nn.Linear) and isinstance(weight, SparseTensor):
            layer._parameters["weight"] = dense(weight)
