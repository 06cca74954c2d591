"""`RowForm`: a matrix of any format by rows, as the schedules of products with dense matrices read it.

A matrix that is stored by rows is used as it is, and so is one stored by columns for a product with its transpose. Any other is
sorted by rows once, and kept as long as its arrays live, because a graph's adjacency is used in every layer of every step:

    CSC, DCSC, A.T of CSR      a counting sort by rows, O(entries), takes as long as a product with about 10 columns
    COO, DCSR                  only positions are counted, nothing moves
    BSR, N:M, hybrid           the coordinates of their entries, without padding of edge blocks

Only integers are kept, never values. These are gathered at every call, so no change of them is missed. Products of two sparse
matrices also keep values, and compare them with a copy (see operations/sparse_product.py).
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
"""The most entries of a matrix that is sorted by rows; the second form of more would take too much memory."""


@dataclass(slots=True, eq=False)
class RowForm:
    """Positions and coordinates of CSR (int32 if they fit), and the number of each entry's stored value (None: in order)."""

    positions: Tensor
    coordinates: Tensor
    order: Tensor | None

    @property
    def format(self) -> Format:
        """CSR with the widths of its integers."""
        return Format.CSR.with_widths(self.positions.dtype.itemsize * 8, self.coordinates.dtype.itemsize * 8)

    def values(self, stored: Tensor) -> Tensor:
        """Returns the values of the entries, in the order of the rows."""
        return stored if self.order is None else stored.index_select(0, self.order)

    def scatter(self, values: Tensor, count: int) -> Tensor:
        """Returns `count` stored values from those of the entries, the inverse of `values`; 0 for padding."""
        return values if self.order is None else values.new_zeros(count).index_copy_(0, self.order.long(), values)


@lru_cache(1024)
def stored_by_rows(format: Format, dim: int) -> bool:
    """Whether the arrays of a matrix are CSR with dimension `dim` as its rows."""
    kinds = [(level.kind, level.dim, level.block) for level in format.levels]
    return kinds == [("dense", dim, 1), ("compressed", 1 - dim, 1)]


def row_form(format: Format, dim: int, shape: Sequence[int], arrays: Sequence[Tensor]) -> RowForm | None:
    """Returns a matrix by rows, which are its dimension `dim`; None if that would take too much memory."""
    structure = arrays[:-1]
    if stored_by_rows(format, dim):
        return RowForm(structure[0].contiguous(), structure[1].contiguous(), None)
    if arrays[-1].numel() > LARGE:
        return None
    return _kept.get(structure, (format.levels, dim, *shape), lambda: sorted_by_rows(format, dim, shape, arrays))


_kept: Remembered[RowForm] = Remembered(most=256)


def sorted_by_rows(format: Format, dim: int, shape: Sequence[int], arrays: Sequence[Tensor]) -> RowForm:
    """Returns a matrix by rows, sorted anew, whatever its size."""
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
