"""`Mask`: an attention mask that is read at the call, with remembered results such as its tile table."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.attention.tile_table import LARGE, Strips, TileTable, tile_table


def _expanded(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Returns the mask as [batch or 1, heads or 1, queries, keys]."""
    mask = mask if mask.dim() == 4 else mask[None, None]
    return mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])


@dataclass(frozen=True)
class Mask:
    """A mask that is read at the call.

    value  returns the mask: [batch or 1, heads or 1, queries or 1, keys] or [queries, keys], bools, or numbers to add
    known  (sizes, make) → the result of `make` for this mask, remembered by the sizes
    lasts  whether other calls will probably use the mask, too
    strips returns a large mask as `Strips`, which are made some queries at a time, or None if that is impossible
    """

    value: Callable[[], Tensor]
    known: Callable[[Sequence[Hashable], Callable[[], Any]], Any]
    lasts: bool = True
    strips: Callable[[], Strips | None] = lambda: None

    def table(self, q: Tensor, k: Tensor, turned: bool = False) -> TileTable:
        """Returns the tile table of the mask, or of its transpose (`turned`)."""
        found: dict[bool, TileTable] = self.known((q.shape[2], k.shape[2]), dict)
        if turned not in found:
            strips = self.strips() if q.shape[2] * k.shape[2] >= LARGE else None
            found[turned] = tile_table(_expanded(self.value(), q, k) if strips is None else strips, turned, self.lasts)
        return found[turned]

    def added(self, dtype: torch.dtype) -> Tensor:
        """Returns the mask as numbers to add to scores, for torch's kernel. It is made once for all layers.

        They have the dtype of q, or f32 if that would round them.
        """

        def make() -> Tensor:
            mask = self.value()
            if mask.dtype != torch.bool:
                exact = dtype if torch.promote_types(mask.dtype, dtype) == dtype else torch.float32
                return mask.to(exact, copy=True)  # a copy, because the remembered tensor may share no memory
            return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))

        numbers: Tensor = self.known(("added", dtype), make)
        return numbers


@lru_cache(16)
def everything(keys: int) -> Mask:
    """Returns the mask that hides nothing."""
    known = Remembered[Any]("none", most=16)
    return Mask(lambda: torch.ones(1, 1, 1, keys, dtype=torch.bool, device="cpu"), partial(known.get, ()))
