"""Methods of torch for sparse layouts, such as `to_sparse_csr` and `sparse_mask`, for SparseTensors."""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gossamer.dialects.errors import ArgumentError
from gossamer.dialects.format import Format
from gossamer.runtime.torch_internals import stored_entries
from gossamer.sparsity.arrays.stored_entries import as_int64
from gossamer.sparsity.operations.sparse_results import pick, sizes_stay_inside
from gossamer.sparsity.tensor.arithmetic import at_entries
from gossamer.sparsity.tensor.entries import letters_of
from gossamer.sparsity.tensor.extension import implements, unsupported
from gossamer.sparsity.tensor.interchange import (
    LAYOUTS,
    compressed_format,
    coo_format,
    coo_indices,
    from_torch,
    layout_of,
    to_layout_of,
)
from gossamer.sparsity.tensor.products import matmul
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to, like


def is_torch_sparse(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of torch.sparse, in any layout."""
    return isinstance(value, Tensor) and not isinstance(value, SparseTensor) and value.layout in LAYOUTS


def in_layout_of(like: Tensor, input: SparseTensor) -> Tensor:
    """Converts to a torch.sparse tensor in the layout of `like`, with the same blocks, batches and dense dimensions.

    Gradients do not flow through it.
    """
    detached: Any = input.detach()
    stored: SparseTensor = detached.to_format(from_torch(like)[0])
    return to_layout_of(like, tuple(input.shape), stored.components)


@implements(torch.Tensor.to_sparse)
def to_sparse(
    input: SparseTensor,
    sparse_dim: int | None = None,
    *,
    layout: torch.layout | None = None,
    blocksize: Sequence[int] | None = None,
    dense_dim: int | None = None,
) -> SparseTensor:
    """Returns the SparseTensor in the format of a layout (default: COO). `to_torch` returns tensors of torch.sparse."""
    if layout in (None, torch.sparse_coo):
        if blocksize is not None or dense_dim is not None:
            raise unsupported("to_sparse to COO with blocksize or dense_dim", "say how many dimensions are sparse")
        return input.to_format(coo_format(input.dim(), input.dim() if sparse_dim is None else sparse_dim))
    return _compressed(input, layout, blocksize, dense_dim)


@implements(torch.Tensor.to_sparse_coo)
def to_sparse_coo(input: SparseTensor) -> SparseTensor:
    """Returns the tensor in COO."""
    return to_sparse(input)


@implements(torch.Tensor.to_sparse_csr)
def to_sparse_csr(input: SparseTensor, dense_dim: int | None = None) -> SparseTensor:
    """Returns the tensor in CSR, with a dense level for each batch dimension in front and each dense dimension behind."""
    return _compressed(input, torch.sparse_csr, None, dense_dim)


@implements(torch.Tensor.to_sparse_csc)
def to_sparse_csc(input: SparseTensor, dense_dim: int | None = None) -> SparseTensor:
    """Returns the tensor in CSC, otherwise as `to_sparse_csr`."""
    return _compressed(input, torch.sparse_csc, None, dense_dim)


@implements(torch.Tensor.to_sparse_bsr)
def to_sparse_bsr(input: SparseTensor, blocksize: Sequence[int], dense_dim: int | None = None) -> SparseTensor:
    """Returns the tensor in BSR, otherwise as `to_sparse_csr`."""
    return _compressed(input, torch.sparse_bsr, blocksize, dense_dim)


@implements(torch.Tensor.to_sparse_bsc)
def to_sparse_bsc(input: SparseTensor, blocksize: Sequence[int], dense_dim: int | None = None) -> SparseTensor:
    """Returns the tensor in BSC, otherwise as `to_sparse_csr`."""
    return _compressed(input, torch.sparse_bsc, blocksize, dense_dim)


@implements(torch.Tensor.sparse_mask)
def sparse_mask(input: Tensor, mask: SparseTensor) -> SparseTensor:
    """Returns the elements of a tensor, sparse or dense, at the entries of `mask`, with the pattern of `mask`."""
    if input.shape != mask.shape or not isinstance(mask, SparseTensor):
        raise ArgumentError(f"sparse_mask of {list(input.shape)} needs a sparse mask of that shape, got {list(mask.shape)}")
    if not isinstance(input, SparseTensor):
        return like(mask, at_entries(mask, input))
    letters = letters_of(mask)
    pattern = bound_to(letters, mask)
    picked = pick(bound_to(letters, input), pattern.with_values(pattern.values.detach().to(input.dtype)))
    return like(mask, picked.to(input.dtype))


_COMPRESSED = {Format.CSR: ("crow_indices", "col_indices"), Format.CSC: ("ccol_indices", "row_indices")}


def _parts_of_layouts() -> None:
    """Registers torch.sparse's methods for arrays, such as `crow_indices`. Formats without the array raise torch's error.

    COO, CSR and CSC give their own arrays, because compiled graphs cannot have tensors of torch.sparse.
    """
    for name in (
        "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices", "is_coalesced", "_indices", "_values",
    ):  # fmt: skip
        method = getattr(torch.Tensor, name)

        def part(input: SparseTensor, name: str = name, method: Callable[[Tensor], Any] = method) -> Any:
            own = _COMPRESSED.get(input.format.with_widths(0, 0), ())
            if name not in own:
                indices = coo_indices(input.format, input.components) if name in ("indices", "_indices") else None
                return method(input.to_torch()) if indices is None else indices
            array = input.components[own.index(name)]
            return array if array.dtype in (torch.int32, torch.int64) else as_int64(array)  # narrow ones are unsigned

        part.__name__, part.__doc__ = name, f"`{name}` of `to_torch`"
        implements(method)(part)


_parts_of_layouts()


@implements(stored_entries)
def _nnz(input: SparseTensor) -> int:
    """Returns the number of entries as torch counts them: a block, or the dense dimensions of an element, is one entry."""
    return input.values().shape[0]


@implements(torch.sspaddmm, torch.Tensor.sspaddmm, torch.saddmm)
def sspaddmm(addend: SparseTensor, left: SparseTensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> SparseTensor:
    """Returns beta * addend + alpha * (left @ right), sparse, in the format of the addend."""
    with sizes_stay_inside():
        product = SparseTensor.from_dense(matmul(left, right).to_dense(), addend.format)
    return torch.add(addend * beta, product, alpha=alpha)  # type: ignore[return-value]


@implements(torch.is_same_size, torch.Tensor.is_same_size)
def is_same_size(input: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape."""
    return input.shape == other.shape


@implements(torch.Tensor.dense_dim)
def dense_dim(input: SparseTensor) -> int:
    """Returns how many of the last dimensions are stored densely."""
    levels = input.format.levels
    end = max((n for n, level in enumerate(levels) if level.kind != "dense"), default=-1)
    first = [min(n for n, level in enumerate(levels) if level.dim == dim) for dim in range(input.dim())]
    return next((n for n, begin in enumerate(reversed(first)) if begin <= end), input.dim())


@implements(torch.Tensor.sparse_dim)
def sparse_dim(input: SparseTensor) -> int:
    """Returns the number of dimensions without those of `dense_dim` and, as torch does, without those of a batch."""
    layout = layout_of(input.format, tuple(input.shape))
    return input.dim() - dense_dim(input) - (layout[1] if layout else 0)


def _compressed(
    input: SparseTensor, layout: torch.layout | None, blocksize: Sequence[int] | None, dense_dim: int | None
) -> SparseTensor:
    batch = input.dim() - 2 - (dense_dim or 0)
    blocked = layout in (torch.sparse_bsr, torch.sparse_bsc)
    if batch < 0 or blocked != (blocksize is not None) or (blocked and len(tuple(blocksize or ())) != 2):
        raise ArgumentError(
            f"to_sparse of {list(input.shape)} to {layout} with {blocksize=} and {dense_dim=}: "
            "BSR and BSC need a "
            "blocksize of two numbers, other layouts take none, and at least two dimensions must be sparse"
        )
    rows, columns = blocksize or (1, 1)
    if input.shape[batch] % rows or input.shape[batch + 1] % columns:
        raise ArgumentError(f"to_sparse of {list(input.shape)}: blocks of {rows} x {columns} do not divide the matrices")
    return input.to_format(compressed_format(layout, input.shape, batch, (rows, columns)))
