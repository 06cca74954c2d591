"""Masks that are looked at when a call is made, and what is remembered of them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.sparsity.attention.tile_table import LARGE, Strips, TileTable, tile_table


def _expanded(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """[batch or 1, heads or 1, queries, keys]"""
    mask = mask if mask.dim() == 4 else mask[None, None]
    return mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])


@dataclass(frozen=True)
class Mask:
    """A mask that is looked at when the call is made.

    value  gives it: [batch or 1, heads or 1, queries or 1, keys] or [queries, keys], of bools, or of numbers to add
    known  (sizes, make) → what `make` returns for this mask, remembered
    lasts  whether other calls will probably have it, too
    strips what gives a large one some queries at a time, or None where that cannot be
    """

    value: Callable[[], Tensor]
    known: Callable[[Sequence[Hashable], Callable[[], Any]], Any]
    lasts: bool = True
    strips: Callable[[], Strips | None] = lambda: None

    def table(self, q: Tensor, k: Tensor, turned: bool = False) -> TileTable:
        """Its table, or that of its transpose."""
        found: dict[bool, TileTable] = self.known((q.shape[2], k.shape[2]), dict)
        if turned not in found:
            strips = self.strips() if q.shape[2] * k.shape[2] >= LARGE else None
            found[turned] = tile_table(_expanded(self.value(), q, k) if strips is None else strips, turned, self.lasts)
        return found[turned]

    def added(self, dtype: torch.dtype) -> Tensor:
        """As numbers to add to scores: made once for all layers, where torch's own kernel computes them all."""

        def make() -> Tensor:
            mask = self.value()
            if mask.dtype != torch.bool:
                return mask.to(dtype, copy=True)  # what is remembered shares no memory
            return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))

        numbers: Tensor = self.known(("added", dtype), make)
        return numbers


@lru_cache(16)
def everything(keys: int) -> Mask:
    """The mask that hides nothing."""
    found: dict[Sequence[Hashable], Any] = {}

    def known(sizes: Sequence[Hashable], make: Callable[[], Any]) -> Any:
        if sizes not in found:
            found[sizes] = make()
        return found[sizes]

    return Mask(lambda: torch.ones(1, 1, 1, keys, dtype=torch.bool), known)
