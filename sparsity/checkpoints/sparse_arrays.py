"""Stores SparseTensors and tensors of torch.sparse in files as their arrays.

adjacency    →    adjacency.sparse_format  uint8 [letters], the text of its `Format`
                  adjacency.sparse_shape   int64 [dimensions]
                  adjacency.sparse_0, …    its arrays, in the order of `Format.components`: positions, coordinates, values

All stored entries stay, also zeros. A tensor of torch.sparse is stored in the format that `SparseTensor.from_torch` gives it.
When a file is loaded, the tensor becomes what the model has in its place.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.sparsity.pruning.stored_experts import StoredExperts
from gossamer.sparsity.pruning.stored_layers import stored_parameters
from gossamer.sparsity.tensor.layouts import in_layout_of, is_torch_sparse
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor

FORMAT, SHAPE = "sparse_format", "sparse_shape"
ARRAY = "sparse_"


def stored_weights(model: nn.Module) -> set[str]:
    """Returns the names of stored weights of linear layers and experts, which a file stores like dense weights."""
    layers = model.named_modules(remove_duplicate=False)
    kinds = nn.Linear, StoredExperts
    return {
        f"{name}.{part}".lstrip(".") for name, layer in layers if isinstance(layer, kinds) for part in stored_parameters(layer)
    }


def arrays_of(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the arrays of a SparseTensor or a tensor of torch.sparse."""
    with torch.no_grad():
        sparse: Any = tensor.detach() if isinstance(tensor, SparseTensor) else SparseTensor.from_torch(tensor.detach())
    text = bytearray(str(sparse.format).encode())
    arrays = {FORMAT: torch.frombuffer(text, dtype=torch.uint8), SHAPE: torch.tensor(tuple(sparse.shape))}
    return arrays | {f"{ARRAY}{number}": array for number, array in enumerate(sparse.components)}


def sparse_tensor(name: str, arrays: Mapping[str, Tensor]) -> SparseTensor:
    """Returns the tensor of these arrays. FormatError, with the tensor's name, if the arrays do not fit together."""
    shape = arrays[SHAPE]
    try:
        format = Format.parse(bytes(arrays[FORMAT].tolist()).decode())
        numbered = {f"{ARRAY}{number}": kind for number, (_, kind) in enumerate(format.components())}
        if missing := numbered.keys() - arrays.keys():
            raise FormatError(f"the arrays {', '.join(sorted(missing))} are missing")
        parts = {kind: [arrays[part] for part in numbered if numbered[part] == kind] for kind in numbered.values()}
        return SparseTensor.from_parts(
            format, shape.tolist(), parts.get("positions", []), parts.get("coordinates", []), parts["values"][0]
        )
    except (FormatError, UnicodeDecodeError, ValueError, TypeError) as problem:
        raise FormatError(f"'{name}': {problem}") from None


def as_held(own: Tensor, value: Tensor) -> Tensor:
    """Converts a tensor of a file to the kind that the model has in its place: SparseTensor, torch.sparse, or dense."""
    if is_torch_sparse(own):
        return in_layout_of(own, as_sparse(value))
    if isinstance(own, SparseTensor):
        return as_sparse(value).to_format(own.format)
    return value.to_dense() if isinstance(value, SparseTensor) else value


def as_sparse(value: Tensor) -> SparseTensor:
    """Returns a dense tensor as a SparseTensor in COO, and a SparseTensor itself."""
    return value if isinstance(value, SparseTensor) else SparseTensor.from_dense(value, Format.coo(value.dim()))
