"""The maps of a set of coordinates, kept for all layers and calls that have it."""

import threading
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.nn.sites import PairMap, Sites, coarser, neighbours, pair_map
from gossamer.sparsity.nn.windows import Window

Kind = Literal["same", "down", "up"]
"""From sites to the same sites, to those that a window leads to, and from those back."""


class SiteMaps:
    """What windows make of some sites. A level is the windows that lead to it."""

    def __init__(self, sites: Sites) -> None:
        self._levels: dict[tuple[Window, ...], Sites] = {(): sites}
        self._maps: dict[tuple[Kind, tuple[Window, ...], Window], PairMap] = {}
        self._lock = threading.RLock()

    def sites(self, level: tuple[Window, ...]) -> Sites:
        """The sites of a level."""
        with self._lock:
            if level not in self._levels:
                self._lead(level[:-1], level[-1])
            return self._levels[level]

    def map(self, kind: Kind, level: tuple[Window, ...], window: Window) -> PairMap:
        """The pairs of a window at a level: the finer one where it leads to another."""
        key = kind, level, window
        with self._lock:
            if key not in self._maps:
                if kind == "same":
                    sites = self.sites(level)
                    self._maps[key] = pair_map(neighbours(sites, window), sites, sites)
                else:
                    self._lead(level, window)
            return self._maps[key]

    def _lead(self, level: tuple[Window, ...], window: Window) -> None:
        fine = self.sites(level)
        coarse, ranks = coarser(fine, window)
        coarse = self._levels.setdefault((*level, window), coarse)
        self._maps["down", level, window] = pair_map(ranks, fine, coarse)
        self._maps["up", level, window] = pair_map([(out, into) for into, out in ranks], coarse, fine)


_known = Remembered[SiteMaps]("all", most=16)
"""Compared by values: Inductor uses a buffer for one set of coordinates after the other, and torch does not count what it
writes there."""


def site_maps(indices: Tensor, shape: Sequence[int], batch: int) -> SiteMaps:
    """Those of checked int32 [N, 1 + D] indices."""
    more = *shape, batch
    return _known.get([indices], more, lambda: SiteMaps(Sites.of(indices, more[:-1], batch)))
