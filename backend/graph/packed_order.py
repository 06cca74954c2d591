"""Maps the values of a packed weight to the values of a CSR matrix that they come from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.dialects.packing import Padded
from gossamer.runtime.packing import Packed
from gossamer.sparsity.compiler.taking import take, take_in_order

_TOLD = 1 << 22
"""Integers below this are distinct in f32."""


@dataclass(frozen=True)
class InOrder:
    """The packed values of each row are its stored values in order. So the packing itself says where each value is.

    panel, scale  see `kernel.take_in_order`
    """

    panel: int
    scale: int


Places = Tensor | InOrder
"""For each packed value the index of the stored one, or -1 for padding. `InOrder` says the same without a number for each."""


def in_order(packed: Packed, starts: Tensor, entries: int, places: Tensor) -> Places:
    """Returns `InOrder` if a packing on a CPU has each row's values in the order of CSR. Otherwise returns `places`."""
    if not isinstance(packed.format, Padded) or not entries or packed.shape[1] >= _TOLD:
        return places
    found = InOrder(0 if packed.format.reduction == 1 else packed.format.columns, packed.format.SCALE)
    numbers = torch.arange(1, entries + 1) % _TOLD  # distinct within a row, because no row is as long
    out = torch.empty(places.numel(), dtype=torch.float32)
    take_in_order(numbers.float(), starts.contiguous(), packed.components[:2], found.panel, found.scale, out)
    expected = torch.where(places < 0, 0, (places + 1) % _TOLD)
    return found if torch.equal(out.int(), expected) else places


def renew(packed: Packed, starts: Tensor, values: Tensor, places: Places) -> None:
    """Writes new stored values into a packing, by their `places`. `starts` has the first stored value of each row."""
    if isinstance(places, InOrder):
        take_in_order(values, starts.contiguous(), packed.components[:2], places.panel, places.scale, packed.values)
    else:
        take(values, places, packed.values)
