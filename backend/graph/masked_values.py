"""Gathers new values of a parameter under a mask into its packed copies.

While the mask does not change, values are read from the parameter directly, without computing the masked matrix. That happens
once, in the order of memory, for all packings of one matrix. Entries that the mask hides are not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gossamer.backend.graph.masked_matrix import Arrangement
from gossamer.backend.graph.packed_order import InOrder, Places, in_order, renew
from gossamer.dialects.format import Format
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.runtime.packing import Packed
from gossamer.sparsity.compiler.kept_entries import KeptEntries
from gossamer.sparsity.compiler.taking import take


@dataclass(frozen=True, eq=False)
class MaskedValues:
    """Maps the packed values of a weight to its parameter.

    given    the index of the parameter among the leaves
    places   for each packed value its index, -1 for padding: among the entries in `kept`, or else in the parameter
    kept     the entries that the mask keeps, by rows, if the parameter is the matrix itself; else None
    factors  the mask's values for the packed values; None if all are 1, or if `kept` has them
    """

    given: int
    places: Places
    kept: KeptEntries | None
    factors: Tensor | None

    @classmethod
    def of(cls, packed: Packed, leaves: Sequence[Tensor], number: int, arranged: Arrangement) -> Self | None:
        """Returns the map, with the parameter at index `number`.

        Returns None if the mask keeps an entry that is not packed, or if shapes, types or strides do not fit."""
        given, mask = leaves[number], leaves[1 - number]
        (rows, columns), dtype = packed.shape, packed.values.dtype
        alike = given.shape == mask.shape and given.numel() <= rows * columns < 1 << 31
        if not alike or given.dtype != dtype or not (given.is_contiguous() and mask.is_contiguous()):
            return None
        order = arranged(torch.arange(1, given.numel() + 1, device=given.device).view(given.shape)).flatten()
        places = packed.source.long()
        if isinstance(packed.format, Format):
            filled = packed.format.padded_shape(packed.shape)[1]
            row, column = places // filled, places % filled
            inside = (row < rows) & (column < columns)
            places = torch.where(inside, row * columns + column, 0)
        else:
            inside = places < order.numel()
        places = torch.where(inside, order[places.clamp(max=order.numel() - 1)] - 1, -1)
        factors = mask.detach().flatten()[places.clamp(min=0)].masked_fill_(places < 0, 0)
        if count_nonzeros(factors) != count_nonzeros(mask.detach()):
            return None
        if given.is_cpu and given.shape == packed.shape and torch.equal(order, torch.arange(1, order.numel() + 1)):
            kept, stored = KeptEntries.of(mask), (mask.detach() != 0).flatten()
            numbers = torch.where(stored, stored.cumsum(0) - 1, -1)
            ordered = in_order(packed, kept.positions, kept.coordinates.numel(), torch.where(places < 0, -1, numbers[places]))
            return cls(number, ordered if isinstance(ordered, InOrder) else ordered.int(), kept, None)
        whole = bool(((factors == 1) | (places < 0)).all())
        return cls(number, places.int(), None, None if whole else factors.to(dtype))

    def renew(self, packed: Packed, leaves: Sequence[Tensor], shared: bool) -> None:
        """Writes the parameter's values into a packing. With `shared`, may take the values that another packing has read."""
        given = leaves[self.given].detach()
        if self.kept is not None:
            kept = self.kept
            values = kept.shared_values(given, leaves[1 - self.given]) if shared else kept.values(given)
            renew(packed, kept.positions, values, self.places)
            return
        assert isinstance(self.places, Tensor)
        take(given.flatten(), self.places, packed.values)
        if self.factors is not None:
            packed.values.mul_(self.factors)
