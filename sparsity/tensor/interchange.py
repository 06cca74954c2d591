"""From and to torch.sparse and SciPy; memory is shared where the layout is the same.

torch.sparse_coo   COO, with dense levels for dense dimensions
torch.sparse_csr   CSR, with a dense level in front for a batch, and dense levels for dense dimensions
torch.sparse_csc, sparse_bsr, sparse_bsc likewise
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.dialects.level import Level
from gossamer.sparsity.arrays.stored_entries import assemble, coordinates

Parts = tuple[Format, tuple[int, ...], tuple[Tensor, ...]]
"""Format, shape and components."""

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Those of torch.sparse."""

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def from_torch(tensor: Tensor) -> Parts:
    """The parts of a torch.sparse tensor."""
    if tensor.layout == torch.sparse_coo:
        return _from_coo(tensor)
    if tensor.layout in LAYOUTS:
        return _from_compressed(tensor)
    raise FormatError(f"from_torch takes strided and torch.sparse tensors, got the layout {tensor.layout}")


def to_torch(format: Format, shape: tuple[int, ...], components: Sequence[Tensor]) -> Tensor:
    """A torch.sparse tensor of the layout that is the format, or COO."""
    make = {
        Format.CSR: torch.sparse_csr_tensor,
        Format.CSC: torch.sparse_csc_tensor,
    }.get(format.with_widths(0, 0))
    blocks = _blocks(format)
    integers = {format.pos_width or 64, format.crd_width or 64}
    if (make or blocks) and len(integers) == 1 and integers <= {32, 64} and shape == format.padded_shape(shape):
        positions, crd, values = components
        if blocks:
            make, values = torch.sparse_bsr_tensor, values.view(-1, *blocks)
        assert make is not None
        return make(positions, crd, values, shape, check_invariants=False)
    at = coordinates(format, shape, components)
    inside = torch.ones_like(at[0], dtype=torch.bool)
    for crd, extent in zip(at, shape, strict=True):
        inside &= crd < extent
    indices, values = torch.stack(at), components[-1]
    if not bool(inside.all()):
        indices, values = indices[:, inside], values[inside]
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()


def to_layout_of(like: Tensor, shape: tuple[int, ...], components: Sequence[Tensor]) -> Tensor:
    """The inverse of `from_torch`: these arrays, in the format that it gives for `like`, in the layout of `like`."""
    if like.layout == torch.sparse_coo:
        _, *at, values = components
        values = values.view(-1, *shape[like.sparse_dim() :])
        return torch.sparse_coo_tensor(torch.stack(at), values, shape, check_invariants=False, is_coalesced=True)
    positions, crd, values = components
    of_like = like.crow_indices() if like.layout in _BY_ROWS else like.ccol_indices()
    batch = of_like.shape[:-1]
    if batch:
        rows = of_like.shape[-1] - 1
        first, last = positions[:-1].view(-1, rows)[:, :1], positions[1:].view(-1, rows)[:, -1:]
        if bool((last - first != (last - first)[:1]).any()):
            raise FormatError(f"{like.layout} has as many entries in each matrix of a batch, here they are not as many")
        positions = torch.cat([positions[:-1].view(-1, rows), last], 1).sub(first).view(*batch, rows + 1)
        crd = crd.view(*batch, -1)
    values = values.view(*crd.shape, *like.values().shape[len(batch) + 1 :])
    return torch.sparse_compressed_tensor(positions, crd, values, shape, layout=like.layout, check_invariants=False)


def from_scipy(matrix: Any) -> Parts:
    """The parts of a SciPy sparse array or matrix, of two dimensions unless it is coo. Values are copied."""
    kind = getattr(matrix, "format", None)
    if kind is None:
        raise FormatError(f"from_scipy takes a SciPy sparse array or matrix, got {type(matrix).__name__}: see from_dense")
    shape = tuple(int(extent) for extent in matrix.shape)
    if kind == "coo":
        at = [_tensor(crd).long() for crd in matrix.coords]
        return _assembled(Format.coo(len(shape)), shape, at, _tensor(matrix.data).clone())
    if kind not in ("csr", "csc", "bsr") or (kind == "bsr" and 1 in matrix.blocksize):
        matrix, kind = matrix.tocsr(), "csr"
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    format = {"csr": Format.CSR, "csc": Format.CSC}.get(kind) or Format.bsr(*matrix.blocksize)
    positions, crd, values = _tensor(matrix.indptr), _tensor(matrix.indices), _tensor(matrix.data).clone()
    width = 32 if crd.dtype == torch.int32 else 0
    return format.with_widths(width, width), shape, (positions, crd, values.contiguous().flatten())


def to_scipy(format: Format, shape: tuple[int, ...], components: Sequence[Tensor]) -> Any:
    """A SciPy array: csr, csc or bsr for the format of that name, else coo."""
    from scipy import sparse

    tensor = to_torch(format, shape, [component.detach().cpu() for component in components])
    if tensor.layout == torch.sparse_coo:
        indices = tensor.indices().numpy()
        return sparse.coo_array((tensor.values().numpy(), tuple(indices)), shape=shape)
    positions, crd, values = (component.detach().cpu().numpy() for component in components)
    if tensor.layout == torch.sparse_bsr:
        values = values.reshape(-1, *(_blocks(format) or ()))
    make = {torch.sparse_csr: sparse.csr_array, torch.sparse_csc: sparse.csc_array}.get(tensor.layout, sparse.bsr_array)
    return make((values, crd, positions), shape=shape)


def coo_format(rank: int, sparse: int) -> Format:
    """COO of the first dimensions, with dense levels for the others."""
    if not 0 < sparse <= rank:
        raise FormatError(f"COO of {sparse} of {rank} dimensions: without sparse ones a tensor is dense, use from_dense")
    return Format((*Format.coo(sparse).levels, *(Level(f"d{dim}") for dim in range(sparse, rank))), rank)


def compressed_format(layout: torch.layout | None, shape: Sequence[int], batch: int, blocks: tuple[int, ...]) -> Format:
    """The format of a compressed layout of torch: dense levels for a batch, the two of a matrix in blocks, dense levels.

    Dense dimensions behind blocks are blocks themselves, each as large as its dimension: MLIR wants those of blocks last.
    """
    rows, columns = f"d{batch}", f"d{batch + 1}"
    outer, inner = (rows, columns) if layout in _BY_ROWS else (columns, rows)
    sizes = {rows: blocks[0], columns: blocks[1]} | {
        f"d{dim}": shape[dim] if blocks != (1, 1) else 1 for dim in range(batch + 2, len(shape))
    }
    levels = [Level(f"d{dim}") for dim in range(batch)]
    levels += [Level(_block(outer, sizes)), Level(_block(inner, sizes), "compressed")]
    levels += [Level(_block(dim, sizes)) for dim in sizes if dim not in (rows, columns)]
    # A block is stored by rows in either layout.
    levels += [Level(f"{dim} mod {size}") for dim, size in sizes.items() if size > 1]
    return Format(tuple(levels), len(shape))


def _from_coo(tensor: Tensor) -> Parts:
    if not tensor.is_coalesced():
        tensor = tensor.coalesce()
    indices, values = tensor.indices().detach(), tensor.values()
    sparse, shape = tensor.sparse_dim(), tuple(tensor.shape)
    format = coo_format(tensor.dim(), sparse)
    positions = torch.tensor([0, indices.shape[1]], device=indices.device)
    crd = [row.contiguous() for row in indices.unbind(0)]
    return format, shape, (positions, *crd, values.contiguous().flatten())


def _from_compressed(tensor: Tensor) -> Parts:
    by_rows, blocked = tensor.layout in _BY_ROWS, tensor.layout in _BLOCKED
    positions, crd = (tensor.crow_indices(), tensor.col_indices()) if by_rows else (tensor.ccol_indices(), tensor.row_indices())
    positions, crd, values = positions.detach(), crd.detach(), tensor.values()
    batch = positions.dim() - 1
    blocks = tuple(values.shape[batch + 1 : batch + 3]) if blocked else (1, 1)
    shape = tuple(tensor.shape)
    if batch:
        positions, crd = _joined(positions, crd)
    width = 32 if crd.dtype == torch.int32 else 0
    format = compressed_format(tensor.layout, shape, batch, blocks).with_widths(width, width)
    return format, shape, (positions.contiguous(), crd.contiguous(), values.contiguous().flatten())


def _block(dim: str, sizes: dict[str, int]) -> str:
    return f"{dim} floordiv {sizes[dim]}" if sizes[dim] > 1 else dim


def _joined(positions: Tensor, crd: Tensor) -> tuple[Tensor, Tensor]:
    """The arrays of a batch, one after the other."""
    positions, crd = positions.flatten(0, -2), crd.flatten(0, -2)
    starts = torch.arange(crd.shape[0], device=crd.device, dtype=positions.dtype)[:, None] * crd.shape[1]
    shifted = positions + starts
    return torch.cat([shifted[:, :-1].flatten(), shifted[-1:, -1]]), crd.flatten()


def _blocks(format: Format) -> tuple[int, int] | None:
    """The block of a BSR format."""
    blocks = [level.block for level in format.levels if level.inner]
    if len(blocks) == 2 and format.with_widths(0, 0) == Format.bsr(*blocks):
        return blocks[0], blocks[1]
    return None


def _assembled(format: Format, shape: tuple[int, ...], at: Sequence[Tensor], values: Tensor) -> Parts:
    for dim, (crd, extent) in enumerate(zip(at, shape, strict=True)):
        if crd.numel() and (int(crd.min()) < 0 or int(crd.max()) >= extent):
            raise FormatError(f"coordinates of d{dim} must be in [0, {extent}), got {int(crd.min())} to {int(crd.max())}")
    return format, shape, assemble(format, shape, at, values)


def _tensor(array: Any) -> Tensor:
    """The memory of a NumPy array as a tensor; copied if torch could not write to it."""
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C"))
