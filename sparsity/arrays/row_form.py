"""Matrices of any format by rows: what the schedules of products with dense matrices walk.

A matrix that is stored by rows is that itself, and so is one stored by columns for a product with its transpose. Any other is
brought into rows once and kept as long as its arrays live, for an adjacency is used in every layer of every step:

    CSC, DCSC, A.T of CSR      a counting sort by rows, O(entries), as much as a product with some 10 columns takes
    COO, DCSR                  positions counted, nothing moves
    BSR, N:M, hybrid           the coordinates of their entries, those that fill up edge blocks left out

What is kept are integers, never values: those are gathered at every call, so that no change of theirs can be missed; for
products of two sparse matrices while they are equal to a copy (see operations/sparse_product.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.arrays import stored_entries
from gossamer.sparsity.arrays.sorting import sort_keys

LARGE = 1 << 26
"""Entries up to which a matrix is brought into rows: the second form of more would take too much memory."""


@dataclass(slots=True, eq=False)
class RowForm:
    """Positions and coordinates of CSR (int32 where they fit), and which stored value each entry has, None if in order."""

    positions: Tensor
    coordinates: Tensor
    order: Tensor | None

    @property
    def format(self) -> Format:
        """CSR of its widths."""
        return Format.CSR.with_widths(self.positions.dtype.itemsize * 8, self.coordinates.dtype.itemsize * 8)

    def values(self, stored: Tensor) -> Tensor:
        """The values of the entries, in their order."""
        return stored if self.order is None else stored.index_select(0, self.order)

    def scatter(self, values: Tensor, count: int) -> Tensor:
        """The inverse of `values`, of so many stored values; 0 for those that no entry has."""
        return values if self.order is None else values.new_zeros(count).index_copy_(0, self.order.long(), values)


@lru_cache(1024)
def stored_by_rows(format: Format, dim: int) -> bool:
    """Whether the arrays of a matrix are CSR with dimension `dim` as its rows."""
    kinds = [(level.kind, level.dim, level.block) for level in format.levels]
    return kinds == [("dense", dim, 1), ("compressed", 1 - dim, 1)]


def row_form(format: Format, dim: int, shape: Sequence[int], arrays: Sequence[Tensor]) -> RowForm | None:
    """A matrix by rows, which are its dimension `dim`; None if that would take too much memory."""
    structure = arrays[:-1]
    if stored_by_rows(format, dim):
        return RowForm(structure[0].contiguous(), structure[1].contiguous(), None)
    if arrays[-1].numel() > LARGE:
        return None
    return _kept.get(structure, (format.levels, dim, *shape), lambda: sorted_by_rows(format, dim, shape, arrays))


_kept: Remembered[RowForm] = Remembered(most=256)


def sorted_by_rows(format: Format, dim: int, shape: Sequence[int], arrays: Sequence[Tensor]) -> RowForm:
    """A matrix by rows, whatever its size, made anew."""
    at = stored_entries.coordinates(format, shape, arrays)
    integer = torch.int32 if max(arrays[-1].numel(), *shape) < 1 << 31 else torch.int64
    rows, columns = at[dim].to(integer), at[1 - dim].to(integer)
    order = None
    if stored_entries.blocked(format):
        order = stored_entries.within(shape, at).nonzero().flatten()
        rows, columns = rows.index_select(0, order), columns.index_select(0, order)
    positions, by_rows = sort_keys(rows, shape[dim], integer)
    if by_rows is not None:
        order = by_rows if order is None else order.index_select(0, by_rows)
        columns = columns.index_select(0, by_rows)
    return RowForm(positions, columns.contiguous(), order)
