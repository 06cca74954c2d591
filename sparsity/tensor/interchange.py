"""Converts from and to torch.sparse and SciPy. Memory is shared where the layout is the same.

torch.sparse_coo   COO, with dense levels for dense dimensions
torch.sparse_csr   CSR, with a dense level in front for a batch, and dense levels for dense dimensions
torch.sparse_csc, sparse_bsr, sparse_bsc likewise
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.dialects.level import Level
from gossamer.sparsity.arrays.stored_entries import as_int64, assemble, blocked, coordinates, within

Parts = tuple[Format, tuple[int, ...], tuple[Tensor, ...]]
"""Format, shape and components."""

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""The layouts of torch.sparse."""

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def from_torch(tensor: Tensor) -> Parts:
    """Returns the parts of a torch.sparse tensor."""
    if tensor.layout == torch.sparse_coo:
        return _from_coo(tensor)
    if tensor.layout in LAYOUTS:
        return _from_compressed(tensor)
    raise FormatError(f"from_torch takes strided and torch.sparse tensors, got the layout {tensor.layout}")


def to_torch(format: Format, shape: tuple[int, ...], components: Sequence[Tensor]) -> Tensor:
    """Returns a torch.sparse tensor in the layout that corresponds to the format, or in COO without dense dimensions."""
    integers = {format.pos_width or 64, format.crd_width or 64}
    fits = len(integers) == 1 and integers <= {32, 64} and shape == format.padded_shape(shape)
    layout = layout_of(format, shape) if fits else None
    made = _compressed(*layout, shape, components) if layout else _hybrid(format, shape, components)
    return _coo(format, shape, components) if made is None else made


def _compressed(
    layout: torch.layout, batch: int, blocks: tuple[int, ...], shape: tuple[int, ...], components: Sequence[Tensor]
) -> Tensor | None:
    """Returns a torch.sparse tensor in a compressed layout, None for a batch of unequal numbers of entries or no rows."""
    positions, crd, values = components
    values = values.view(crd.numel(), *blocks, *shape[batch + 2 :])
    if batch:
        matrices = prod(shape[:batch])
        lines = (positions.numel() - 1) // max(matrices, 1)
        each = crd.numel() // max(matrices, 1)
        starts = torch.arange(matrices, device=crd.device, dtype=positions.dtype)[:, None] * each
        if not matrices or not lines or not torch.equal(positions[: matrices * lines : lines], starts[:, 0]):
            return None
        ends = torch.cat([positions[lines::lines]])[:, None]
        positions = (torch.cat([positions[:-1].view(matrices, lines), ends], 1) - starts).view(*shape[:batch], lines + 1)
        crd, values = crd.view(*shape[:batch], each), values.view(*shape[:batch], each, *values.shape[1:])
    return torch.sparse_compressed_tensor(positions, crd, values, shape, layout=layout, check_invariants=False)


def layout_of(format: Format, shape: tuple[int, ...]) -> tuple[torch.layout, int, tuple[int, ...]] | None:
    """Returns torch's compressed layout for the format, its number of batch dimensions, and its block sizes; or None."""
    inner = {level.dim: level.block for level in format.levels if level.inner}
    for batch in range(format.rank - 1):
        blocks = inner.get(batch, 1), inner.get(batch + 1, 1)
        plain = blocks == (1, 1)
        for layout in (torch.sparse_csr, torch.sparse_csc) if plain else (torch.sparse_bsr, torch.sparse_bsc):
            if compressed_format(layout, shape, batch, blocks) == format.with_widths(0, 0):
                return layout, batch, () if plain else blocks
    return None


def _hybrid(format: Format, shape: tuple[int, ...], components: Sequence[Tensor]) -> Tensor | None:
    """Returns a torch.sparse tensor in COO, also with dense dimensions. Returns None for formats without such a layout."""
    indices = coo_indices(format, components)
    if indices is None:
        return None
    sparse, entries = indices.shape
    values = components[-1].view(entries, *shape[sparse:])
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)


def coo_indices(format: Format, components: Sequence[Tensor]) -> Tensor | None:
    """Returns the coordinates as torch's COO has them, [sparse dimensions, entries]. Returns None for other formats."""
    plain = format.with_widths(0, 0)
    if not any(plain == coo_format(format.rank, count) for count in range(1, format.rank + 1)):
        return None
    return torch.stack([as_int64(crd) for crd in components[1:-1]])


def _coo(format: Format, shape: tuple[int, ...], components: Sequence[Tensor]) -> Tensor:
    at = coordinates(format, shape, components)
    indices, values = torch.stack(at), components[-1]
    if shape != format.padded_shape(shape):
        inside = within(shape, at)
        indices, values = indices[:, inside], values[inside]
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()


def to_layout_of(like: Tensor, shape: tuple[int, ...], components: Sequence[Tensor]) -> Tensor:
    """Returns arrays as a torch.sparse tensor in the layout of `like`. They have the format that `from_torch(like)` gives."""
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
            raise FormatError(f"{like.layout} needs equally many entries in each matrix of a batch; here their numbers differ")
        positions = torch.cat([positions[:-1].view(-1, rows), last], 1).sub(first).view(*batch, rows + 1)
        crd = crd.view(*batch, -1)
    values = values.view(*crd.shape, *like.values().shape[len(batch) + 1 :])
    return torch.sparse_compressed_tensor(positions, crd, values, shape, layout=like.layout, check_invariants=False)


def from_scipy(matrix: Any) -> Parts:
    """Returns the parts of a SciPy sparse array or matrix, and copies the values. Vectors become COO."""
    kind = getattr(matrix, "format", None)
    if kind is None:
        raise FormatError(f"from_scipy takes a SciPy sparse array or matrix, got {type(matrix).__name__}: see from_dense")
    shape = tuple(int(extent) for extent in matrix.shape)
    if kind == "coo" or len(shape) != 2:
        matrix = matrix.tocoo()
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
    """Returns a SciPy array: csr, csc or bsr for the format of that name, else coo."""
    from scipy import sparse

    held = [component.detach().cpu() for component in components]
    tensor = to_torch(format, shape, held)
    if len(shape) != 2 or tensor.layout not in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
        tensor = tensor if tensor.layout == torch.sparse_coo and not tensor.dense_dim() else _coo(format, shape, held)
        indices = tensor.indices().numpy()
        return sparse.coo_array((tensor.values().numpy(), tuple(indices)), shape=shape)
    positions, crd, _ = (component.numpy() for component in held)
    values = tensor.values().numpy()
    make = {torch.sparse_csr: sparse.csr_array, torch.sparse_csc: sparse.csc_array}.get(tensor.layout, sparse.bsr_array)
    return make((values, crd, positions), shape=shape)


def coo_format(rank: int, sparse: int) -> Format:
    """Returns COO of the first dimensions, with dense levels for the others."""
    if not 0 < sparse <= rank:
        raise FormatError(f"COO of {sparse} of {rank} dimensions: without sparse ones a tensor is dense, use from_dense")
    return Format((*Format.coo(sparse).levels, *(Level(f"d{dim}") for dim in range(sparse, rank))), rank)


def compressed_format(layout: torch.layout | None, shape: Sequence[int], batch: int, blocks: tuple[int, ...]) -> Format:
    """Returns the format of a compressed layout of torch: dense levels for a batch, two matrix levels, dense levels.

    Dense dimensions behind blocks become blocks of their whole size, because MLIR needs block levels last. The format has no
    blocks if one of these sizes is below 2, or if blocks have one column and several rows.
    """
    if any(below < 2 for above, below in pairwise([*blocks, *shape[batch + 2 :]]) if above > 1):
        blocks = (1, 1)
    rows, columns = f"d{batch}", f"d{batch + 1}"
    outer, inner = (rows, columns) if layout in _BY_ROWS else (columns, rows)
    sizes = {rows: blocks[0], columns: blocks[1]} | {
        f"d{dim}": shape[dim] if blocks != (1, 1) else 1 for dim in range(batch + 2, len(shape))
    }
    levels = [Level(f"d{dim}") for dim in range(batch)]
    levels += [Level(_block(outer, sizes)), Level(_block(inner, sizes), "compressed")]
    levels += [Level(_block(dim, sizes)) for dim in sizes if dim not in (rows, columns)]
    # BSR and BSC both store a block by rows.
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
    by_rows = tensor.layout in _BY_ROWS
    positions, crd = (tensor.crow_indices(), tensor.col_indices()) if by_rows else (tensor.ccol_indices(), tensor.row_indices())
    positions, crd, values = positions.detach(), crd.detach(), tensor.values()
    batch = positions.dim() - 1
    blocks = tuple(values.shape[batch + 1 : batch + 3]) if tensor.layout in _BLOCKED else (1, 1)
    shape = tuple(tensor.shape)
    if batch:
        positions, crd = _joined(positions, crd)
    width = 32 if crd.dtype == torch.int32 else 0
    format = compressed_format(tensor.layout, shape, batch, blocks).with_widths(width, width)
    if blocks != (1, 1) and not blocked(format):
        return format, shape, _without_blocks(format, shape, (positions, crd, values.flatten(0, batch)), by_rows, batch)
    return format, shape, (positions.contiguous(), crd.contiguous(), values.contiguous().flatten())


def _without_blocks(
    format: Format, shape: Sequence[int], components: Sequence[Tensor], by_rows: bool, batch: int
) -> tuple[Tensor, ...]:
    """Returns the arrays of a blocked layout of torch in a format without blocks. Zeros in blocks stay."""
    positions, crd, values = components
    rows, columns = values.shape[1:3]
    outer = shape[batch] // rows if by_rows else shape[batch + 1] // columns
    lines = torch.arange(positions.numel() - 1, device=crd.device).repeat_interleave(positions.long().diff())
    above, line = lines // max(outer, 1), lines % max(outer, 1)
    row, column = (line, crd.long()) if by_rows else (crd.long(), line)
    first = [row * rows, column * columns]
    for extent in reversed(shape[:batch]):
        first.insert(0, above % extent)
        above = above // extent
    within = torch.ones(values.shape[1:], dtype=torch.bool, device=crd.device).nonzero().unbind(1)
    starts = [*first, *[torch.zeros_like(lines)] * (len(within) - 2)]
    offsets = [*[torch.zeros_like(within[0])] * batch, *within]
    at = [(start[:, None] + offset).flatten() for start, offset in zip(starts, offsets, strict=True)]
    return assemble(format, shape, at, values.flatten())


def _block(dim: str, sizes: dict[str, int]) -> str:
    return f"{dim} floordiv {sizes[dim]}" if sizes[dim] > 1 else dim


def _joined(positions: Tensor, crd: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenates the arrays of a batch."""
    positions, crd = positions.flatten(0, -2), crd.flatten(0, -2)
    starts = torch.arange(crd.shape[0], device=crd.device, dtype=positions.dtype)[:, None] * crd.shape[1]
    shifted = positions + starts
    return torch.cat([shifted[:, :-1].flatten(), shifted[-1:, -1]]), crd.flatten()


def _assembled(format: Format, shape: tuple[int, ...], at: Sequence[Tensor], values: Tensor) -> Parts:
    for dim, (crd, extent) in enumerate(zip(at, shape, strict=True)):
        if crd.numel() and (int(crd.min()) < 0 or int(crd.max()) >= extent):
            raise FormatError(f"coordinates of d{dim} must be in [0, {extent}), got {int(crd.min())} to {int(crd.max())}")
    return format, shape, assemble(format, shape, at, values)


def _tensor(array: Any) -> Tensor:
    """Returns a tensor that shares the memory of a NumPy array, or a copy if torch could not write to the array."""
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C"))
