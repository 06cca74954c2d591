"""Computes attention over a pattern whose entries fill tiles, such as a window or blocks, by the kernel for masks.

That kernel multiplies whole tiles instead of gathering entry by entry.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.attention import TILE_KEYS, TILE_QUERIES
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.attention.masked_attention import LARGEST_HEAD, Scoring, attend, gradients
from gossamer.sparsity.attention.tile_table import TileTable, listed

_TERMS = ("queries", "keys", "values")

_LEAST_FILLED = 0.4
"""Below this share of entries among the pairs in tiles, gathering is faster."""

_LEAST_ENTRIES = 1 << 14
_LEAST_IN_ROW = 8


@dataclass
class _Pattern:
    """The record of a pattern: its number of calls, and the tile tables of it and its transpose, if it fills tiles."""

    calls: int = 0
    table: TileTable | None = None
    turned: TileTable | None = None


_patterns = Remembered[_Pattern]("uncounted", most=16)


def attend_tiled(
    positions: Tensor, coordinates: Tensor, given: dict[str, Tensor], scale: float
) -> tuple[Tensor, Tensor] | None:
    """Computes gossamer::attend_edges for scores that are products of queries and keys times a number.

    Returns None if the kernel for masks cannot compute it, or not faster, and at the first call with a pattern.
    """
    known = _pattern(positions, coordinates, given)
    if known is None:
        return None
    known.calls += 1
    if known.calls == 2:  # the tables do not pay for patterns that are new at every call
        sizes = positions.shape[0] - 1, given["values"].shape[0]
        i, j = np.repeat(np.arange(sizes[0]), np.diff(positions.numpy())), coordinates.numpy().astype(np.int64)
        known.table, known.turned = _table(i, j, *sizes), _table(j, i, *sizes[::-1])
    if known.table is None:
        return None
    out, logarithms = attend(*_heads(given), known.table, Scoring(scale))
    largest = logarithms[0].T  # the logarithms of the sums, so that the sums themselves become 1
    return out[0].transpose(0, 1).contiguous(), torch.stack([largest, torch.ones_like(largest)], 1)


def tiled_gradients(
    gradient: Tensor,
    out: Tensor,
    statistics: Tensor,
    positions: Tensor,
    coordinates: Tensor,
    given: dict[str, Tensor],
    scale: float,
) -> dict[str, Tensor] | None:
    """Returns the gradients of queries, keys and values, None if the other kernels are faster."""
    known = _pattern(positions, coordinates, given)
    if known is None or known.table is None or known.turned is None:
        return None
    largest, inverse = statistics.unbind(1)
    logarithms = torch.where(inverse > 0, largest - inverse.log(), 0).T[None]
    upstream, result = (x.transpose(0, 1)[None] for x in (gradient, out))
    found = gradients(upstream, _heads(given), result, logarithms, (known.table, known.turned), Scoring(scale))
    return {name: x[0].transpose(0, 1) for name, x in zip(_TERMS, found, strict=True)}


def _heads(given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (given[name].transpose(0, 1)[None] for name in _TERMS)
    return q, k, v


def _pattern(positions: Tensor, coordinates: Tensor, given: dict[str, Tensor]) -> _Pattern | None:
    """Returns the record of a pattern, None if it is too small, or the kernel for masks cannot take the terms."""
    if set(given) != set(_TERMS) or given["values"].dtype != torch.float32:
        return None
    rows, size = positions.shape[0] - 1, given["values"].shape[2]
    if size != given["keys"].shape[2] or not 0 < size <= LARGEST_HEAD:
        return None
    if coordinates.shape[0] < max(_LEAST_ENTRIES, _LEAST_IN_ROW * rows):
        return None
    return _patterns.get([positions, coordinates], (given["values"].shape[0],), _Pattern)


def _table(i: Any, j: Any, rows: int, columns: int) -> TileTable | None:
    """Returns the tile table of entries, None if they leave tiles mostly empty, or occur twice."""
    wide = ceil(columns / TILE_KEYS)
    found, number = np.unique(i // TILE_QUERIES * wide + j // TILE_KEYS, return_inverse=True)
    if len(i) < _LEAST_FILLED * len(found) * TILE_QUERIES * TILE_KEYS:
        return None
    words = np.zeros((len(found), TILE_QUERIES), dtype=np.uint16)
    np.bitwise_or.at(words, (number, i % TILE_QUERIES), (1 << j % TILE_KEYS).astype(np.uint16))
    if np.unpackbits(words.view(np.uint8)).sum() != len(i):
        return None
    none = np.zeros_like(found)
    return listed((1, 1, ceil(rows / TILE_QUERIES)), (none, none, found // wide, found % wide), words)
