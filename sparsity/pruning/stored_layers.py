"""Linear layers whose weight is a SparseTensor parameter (see store_sparse.py): which they are, and the way back."""

from torch import nn

from gossamer.dialects.format import Format
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

FORMAT = Format.CSR.with_widths(32, 32)
"""In which weights are stored."""

DENSEST = 0.5
"""Density above which a step of training costs as much as a dense one."""


def is_stored(layer: nn.Module) -> bool:
    """Whether a layer's weight stores its nonzeros alone."""
    return isinstance(layer._parameters.get("weight"), SparseTensor)


def make_dense(model: nn.Module) -> None:
    """Makes the stored weights of linear layers dense parameters with zeros, in place; shared ones go on being shared."""
    dense: dict[int, nn.Parameter] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if isinstance(layer, nn.Linear) and isinstance(weight, SparseTensor):
            if id(weight) not in dense:
                dense[id(weight)] = nn.Parameter(weight.detach().to_dense(), weight.requires_grad)
            layer._parameters["weight"] = dense[id(weight)]
