"""Finds the fibres of a sparse tensor along some dimensions, as segments of its stored values, for softmax and reductions.

    gossamer::fibres(arrays, sizes, spec, everyone) -> Tensor[]    positions and order

If fibres lie in memory one after the other, such as the rows of a CSR matrix, the tensor's own positions are used, and nothing
is computed.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.operations import Operation
from gossamer.sparsity.arrays.stored_entries import blocked, coordinates, within
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec, bind, flat
from gossamer.sparsity.operations.batches import batched_one_by_one
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside
from gossamer.sparsity.tensor.coordinate_list import some_of
from gossamer.sparsity.tensor.entries import letters_of
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor, bound_to, values_of


@dataclass(frozen=True)
class Fibres:
    """The stored values of a tensor, fibre by fibre.

    positions  [fibres + 1]: where each fibre begins
    values     [entries], differentiable
    order      [entries]: the number of each stored value; None if the values are all the stored ones in their order
    """

    positions: Tensor
    values: Tensor
    order: Tensor | None

    def stored(self, values: Tensor, count: int) -> Tensor:
        """Returns values of the entries in the order of the tensor's stored values [count]; padding of edge blocks is 0."""
        if self.order is None:
            return values
        return values.new_zeros(count).index_put((self.order,), values)


def stored_fibres(tensor: SparseTensor, dim: int) -> Fibres:
    """Returns the fibres along one dimension that have entries. There may be empty ones among them."""
    level = tensor.format.levels[-1]
    if level.kind == "compressed" and level.dim == dim and level.block == 1:
        return Fibres(tensor.positions(len(tensor.format.levels) - 1), values_of(tensor), None)
    return _gathered(tensor, {dim}, everyone=False)


def all_fibres(tensor: SparseTensor, along: Collection[int]) -> Fibres:
    """Returns one fibre for each coordinate of the other dimensions, in their order."""
    *above, level = tensor.format.levels
    kept = [dim for dim in range(tensor.dim()) if dim not in along]
    in_rows = all(each.kind == "dense" for each in above) and [each.dim for each in above] == kept
    if in_rows and level.kind == "compressed" and {level.dim} == set(along):
        return Fibres(tensor.positions(len(above)), values_of(tensor), None)
    return _gathered(tensor, along, everyone=True)


def _gathered(tensor: SparseTensor, along: Collection[int], everyone: bool) -> Fibres:
    letters = letters_of(tensor)
    kept = "".join(letter for dim, letter in enumerate(letters) if dim not in along)
    bound = bound_to(letters, tensor)
    with torch.no_grad(), sizes_stay_inside():
        positions, order = torch.ops.gossamer.fibres.default(*flat([bound], Operand(kept)), everyone)
    return Fibres(positions, bound.values.index_select(0, order), order)


def _fibres(arrays: list[Tensor], sizes: list[int], text: str, everyone: bool) -> list[Tensor]:
    spec = Spec.parse(text)
    (tensor,) = bind(arrays, sizes, spec)
    assert tensor.format is not None
    at = coordinates(tensor.format, tensor.shape, tensor.arrays)
    fibre = torch.zeros_like(at[0])
    count = 1
    for letter in spec.result.letters:
        dim = tensor.letters.index(letter)
        fibre = fibre * tensor.shape[dim] + at[dim]
        count *= tensor.shape[dim]
    inside = None
    if blocked(tensor.format):
        inside = within(tensor.shape, at).nonzero().flatten()
        fibre = fibre[inside]
    fibre, order = fibre.sort(stable=True)
    if everyone:
        positions = torch.searchsorted(fibre, torch.arange(count + 1, device=fibre.device))
    else:
        ends = torch.unique_consecutive(fibre, return_counts=True)[1].cumsum(0)
        positions = fibre.new_full((fibre.numel() + 1,), fibre.numel())
        positions[0] = 0
        positions[1 : ends.numel() + 1] = ends
    return [positions, order if inside is None else inside[order]]


def _fibres_fake(arrays: list[Tensor], sizes: list[int], text: str, everyone: bool) -> list[Tensor]:
    spec = Spec.parse(text)
    (tensor,) = bind(arrays, sizes, spec)
    assert tensor.format is not None
    entries: Any = tensor.values.shape[0]
    if blocked(tensor.format):
        entries = some_of(tensor.values)
    extents = dict(zip(tensor.letters, tensor.shape, strict=True))
    count = prod(extents[letter] for letter in spec.result.letters) if everyone else entries
    return [tensor.values.new_empty([size], dtype=torch.int64) for size in (count + 1, entries)]


Operation(
    "fibres(Tensor[] arrays, SymInt[] sizes, str spec, bool everyone) -> Tensor[]",
    _fibres,
    _fibres,
    _fibres_fake,
    batched=batched_one_by_one,
).register()
