"""Where packed values are among those of a matrix in CSR."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.dialects.packing import Padded
from gossamer.runtime.packing import Packed
from gossamer.sparsity.compiler.taking import take, take_in_order

_TOLD = 1 << 22
"""Numbers that f32 tells apart."""


@dataclass(frozen=True)
class InOrder:
    """Packed values that are stored ones, each row's in its order, so that a packing says itself where they are: see
    `kernel.take_in_order` for `panel` and `scale`."""

    panel: int
    scale: int


Places = Tensor | InOrder
"""Where the packed values are among the stored ones."""


def in_order(packed: Packed, starts: Tensor, entries: int, places: Tensor) -> Places:
    """The same `places` without a number for each, if the packing, on a CPU, has each row's values in the order of CSR."""
    if not isinstance(packed.format, Padded) or not entries or packed.shape[1] >= _TOLD:
        return places
    found = InOrder(0 if packed.format.reduction == 1 else packed.format.columns, packed.format.SCALE)
    numbers = torch.arange(1, entries + 1) % _TOLD  # no row is as long, so that they tell its values
    out = torch.empty(places.numel(), dtype=torch.float32)
    take_in_order(numbers.float(), starts.contiguous(), packed.components[:2], found.panel, found.scale, out)
    expected = torch.where(places < 0, 0, (places + 1) % _TOLD)
    return found if torch.equal(out.int(), expected) else places


def renew(packed: Packed, starts: Tensor, values: Tensor, places: Places) -> None:
    """Takes over stored values, which are at these `places`; `starts` says where each row of them begins."""
    if isinstance(places, InOrder):
        take_in_order(values, starts.contiguous(), packed.components[:2], places.panel, places.scale, packed.values)
    else:
        take(values, places, packed.values)
