"""`CoordinateList`: the stored entries of a tensor with their coordinates, on which reshaping, joining and slicing work.

gossamer::coordinates(arrays, sizes, spec) -> Tensor[]         the numbers of the values, and their coordinates
gossamer::places(coordinates, index, extent) -> Tensor[]       the entries that an index names, and their new coordinates
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.modules import sizes
from gossamer.runtime.operations import Operation
from gossamer.sparsity.arrays.stored_entries import blocked, coordinates, within
from gossamer.sparsity.arrays.structure import with_room
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.loop_order import unblocked
from gossamer.sparsity.compiler.operands import ARGUMENTS, Spec, bind, flat
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.entries import letters_of
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to, from_entries


@dataclass(frozen=True)
class CoordinateList:
    """at: for each dimension [entries] of int64, within the shape; values: [entries], differentiable."""

    at: tuple[Tensor, ...]
    values: Tensor

    @classmethod
    def of(cls, tensor: SparseTensor) -> "CoordinateList":
        """Returns all entries of a tensor, without the padding of blocks and N:M groups."""
        letters = letters_of(tensor)
        bound = bound_to(letters, tensor)
        with sizes_stay_inside():
            which, *at = torch.ops.gossamer.coordinates.default(*flat([bound.with_values(bound.values.detach())], Operand("p")))
        return cls(tuple(at), bound.values.index_select(0, which))

    def placed(self, dim: int, index: Tensor, extent: int) -> "CoordinateList":
        """Returns the entries whose coordinate is in the index, once for each occurrence, with its place as new coordinate."""
        with sizes_stay_inside():
            which, place = torch.ops.gossamer.places.default(self.at[dim], index, extent)
        at = [place if n == dim else crd.index_select(0, which) for n, crd in enumerate(self.at)]
        return CoordinateList(tuple(at), self.values.index_select(0, which))

    def assembled(self, format: Format, shape: Sequence[int]) -> SparseTensor:
        """Returns the tensor of these entries in a format, with wider coordinates if the shape needs them."""
        return from_entries(with_room(format, shape), shape, self.at, self.values)


def of_rank(format: Format, rank: int) -> Format:
    """Returns a similar format for another number of dimensions: COO stays COO; others stay if they can, else CSR or CSF."""
    if format.levels == Format.coo(format.rank).levels:
        return Format.coo(rank).with_widths(format.pos_width, format.crd_width)
    return unblocked(format, rank)


def some_of(entries: Tensor) -> Any:
    """For tracing, returns an open size for a part of these entries, or 0 for no entries, as Inductor needs (torch 2.13)."""
    return 0 if sizes.known_true(entries.shape[0] == 0) else torch.library.get_ctx().new_dynamic_size(min=0)


def _coordinates(arrays: list[Tensor], sizes: list[int], text: str) -> list[Tensor]:
    (tensor,) = bind(arrays, sizes, Spec.parse(text))
    assert tensor.format is not None
    at = coordinates(tensor.format, tensor.shape, tensor.arrays)
    if not blocked(tensor.format):
        return [torch.arange(tensor.values.numel(), device=at[0].device), *(crd.clone() for crd in at)]
    kept = within(tensor.shape, at)
    if tensor.format.levels[-1].structured:
        kept &= tensor.values != 0
    which = kept.nonzero().flatten()
    return [which, *(crd[which] for crd in at)]


def _coordinates_fake(arrays: list[Tensor], sizes: list[int], text: str) -> list[Tensor]:
    (tensor,) = bind(arrays, sizes, Spec.parse(text))
    assert tensor.format is not None
    entries = some_of(tensor.values) if blocked(tensor.format) else tensor.values.shape[0]
    return [tensor.values.new_empty([entries], dtype=torch.int64) for _ in range(1 + len(tensor.shape))]


def _places(crd: Tensor, index: Tensor, extent: int) -> list[Tensor]:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= extent):
        at = int(((index < 0) | (index >= extent)).nonzero()[0])
        raise IndexError(f"index {int(index[at])}, number {at}, is out of bounds for a dimension of size {extent}")
    by_name, order = index.long().sort(stable=True)
    first = torch.searchsorted(by_name, crd)
    times = torch.searchsorted(by_name, crd, right=True) - first
    which = torch.arange(crd.numel(), device=crd.device).repeat_interleave(times)
    begun = times.cumsum(0) - times
    return [which, order[first[which] + torch.arange(which.numel(), device=crd.device) - begun[which]]]


def _places_fake(crd: Tensor, index: Tensor, extent: int) -> list[Tensor]:
    entries = some_of(crd)
    return [crd.new_empty([entries]) for _ in range(2)]


Operation(
    f"coordinates{ARGUMENTS} -> Tensor[]", _coordinates, _coordinates, _coordinates_fake, batched=batched_one_by_one
).register()
Operation(
    "places(Tensor coordinates, Tensor index, SymInt extent) -> Tensor[]",
    _places,
    _places,
    _places_fake,
    batched=batched_one_by_one,
).register()
