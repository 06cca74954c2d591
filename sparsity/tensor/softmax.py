"""Softmax of SparseTensors over their stored entries, as torch.sparse.softmax computes it."""

import torch
import torch.nn.functional as F

from gossamer.sparsity.operations.segments import segment_softmax
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.fibres import stored_fibres
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, like, values_of


@implements(torch.softmax, torch.Tensor.softmax, torch.sparse.softmax, torch.special.softmax)
def softmax(input: SparseTensor, dim: int, dtype: torch.dtype | None = None) -> SparseTensor:
    """Returns the softmax of the stored entries along a dimension, in the same pattern.

    Elements that are not stored count as minus infinity, not as 0, and stay unstored. Zeros that pad blocks or N:M groups, or
    that a format's `pack` adds, count as entries: `to_format(Format.CSR)` drops them.
    """
    return _softmax(input, dim, dtype, log=False)


@implements(torch.log_softmax, torch.Tensor.log_softmax, torch.sparse.log_softmax, torch.special.log_softmax)
def log_softmax(input: SparseTensor, dim: int, dtype: torch.dtype | None = None) -> SparseTensor:
    """Returns the logarithm of `softmax`."""
    return _softmax(input, dim, dtype, log=True)


@implements(F.softmax)
def functional_softmax(
    input: SparseTensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> SparseTensor:
    """Implements torch.nn.functional.softmax."""
    return _softmax(input, dim, dtype, log=False)


@implements(F.log_softmax)
def functional_log_softmax(
    input: SparseTensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> SparseTensor:
    """Implements torch.nn.functional.log_softmax."""
    return _softmax(input, dim, dtype, log=True)


def _softmax(input: SparseTensor, dim: int | None, dtype: torch.dtype | None, log: bool) -> SparseTensor:
    if dim is None:
        raise unsupported("softmax without a dimension", "say which one, such as dim=-1")
    if not -input.dim() <= dim < input.dim():
        raise IndexError(f"dimension {dim} is out of range for a SparseTensor of {input.dim()} dimensions")
    if dtype is not None and dtype != input.dtype:
        input = like(input, values_of(input).to(dtype))
    fibres = stored_fibres(input, dim % input.dim())
    values = segment_softmax(fibres.positions, fibres.values, log)
    return like(input, fibres.stored(values, input.components[-1].shape[0]))
