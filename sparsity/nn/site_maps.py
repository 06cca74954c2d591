"""Keeps the pair maps of a set of coordinates, for all layers and calls with the same coordinates."""

import threading
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.nn.sites import PairMap, Sites, coarser, neighbours, pair_map
from gossamer.sparsity.nn.windows import Window

Kind = Literal["same", "down", "up"]
"""From sites to the same sites, to the sites that a window leads to, and from these back (see convolve.py)."""


class SiteMaps:
    """The sites and pair maps that follow from some sites by windows. A level is a tuple of the windows that lead to it."""

    def __init__(self, sites: Sites) -> None:
        self._levels: dict[tuple[Window, ...], Sites] = {(): sites}
        self._maps: dict[tuple[Kind, tuple[Window, ...], Window], PairMap] = {}
        self._lock = threading.RLock()

    def sites(self, level: tuple[Window, ...]) -> Sites:
        """Returns the sites of a level."""
        with self._lock:
            if level not in self._levels:
                self._lead(level[:-1], level[-1])
            return self._levels[level]

    def map(self, kind: Kind, level: tuple[Window, ...], window: Window) -> PairMap:
        """Returns the pairs of a window. `level` is the finer of its two levels."""
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
"""Compared by values, because Inductor reuses a buffer for other coordinates, and torch does not count these writes."""


def site_maps(indices: Tensor, shape: Sequence[int], batch: int) -> SiteMaps:
    """Returns the maps of int32 indices [N, 1 + D], which are checked when they are new."""
    more = *shape, batch
    return _known.get([indices], more, lambda: SiteMaps(Sites.of(indices, more[:-1], batch)))
