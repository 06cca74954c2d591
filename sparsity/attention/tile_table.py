"""`TileTable`: the tiles of queries and keys that a mask does not hide, in the form for kernels (see dialects/attention.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.attention import ADD, ADDED_LOW, FILLED_LOW, TILE_KEYS, TILE_QUERIES, Step
from gossamer.runtime.memory.huge_pages import large_empty

Array = np.ndarray[Any, Any]

_ALL = 0xFFFF  # the word of a query that sees all keys of a tile
_LOWERED = -1e3
_ABSORBING = -5e8  # f32 numbers are 32 apart here, so that sums with common scores are this number

LARGE = 1 << 22
"""A mask with this many elements or more is made some queries at a time."""
_STRIP = 1 << 20  # elements of a strip of a mask, unless a row of tiles has more


_NONE = np.zeros((0, TILE_KEYS, TILE_QUERIES), dtype=np.float32)


@dataclass(frozen=True)
class TileTable:
    """The tiles that a mask does not hide.

    positions  int32 [batch or 1, heads or 1, rows of tiles + 1]; one row of tiles if all queries see the same keys
    tiles      int32 [tiles, 3]: twice the column of the tile, plus 1 if it is hidden in part; number of its words; of its
               floats
    words      int16 [tiles hidden in part, TILE_QUERIES]: a bit for each key that a query sees
    floats     float32 [distinct tiles, TILE_KEYS, TILE_QUERIES], numbers to add to the scores; none if the mask adds nothing
    """

    positions: Tensor
    tiles: Tensor
    words: Tensor
    floats: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """All arrays, in the order of the kernels' operands."""
        return [self.positions, self.tiles, self.words, self.floats]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the score function that add its floats, if it has any."""
        return (ADD,) if len(self.floats) else ()

    def share(self, keys: int) -> float:
        """Returns its share of all tiles."""
        rows = self.positions.shape[0] * self.positions.shape[1] * (self.positions.shape[2] - 1)
        return self.tiles.shape[0] / max(1, rows * ceil(keys / TILE_KEYS))

    def unseeing(self) -> Tensor:
        """Returns which queries see no key: bools [batch or 1, heads or 1, rows of tiles * TILE_QUERIES]."""
        counts = self.positions.diff().flatten()
        words = np.full((len(self.tiles), TILE_QUERIES), _ALL, dtype=np.uint16)
        partial = (self.tiles[:, 0] & 1).bool().numpy()
        words[partial] = self.words.numpy().view(np.uint16)
        seen = torch.zeros(len(counts), TILE_QUERIES, dtype=torch.bool)
        seen.index_add_(0, torch.arange(len(counts)).repeat_interleave(counts), torch.from_numpy(words != 0))
        return ~seen.view(*self.positions.shape[:2], -1)

    def picture(self, keys: int, size: int = 24) -> str:
        """Draws the tiles of the first batch and head, several in a character: " " none, "░▒▓" some, "█" all."""
        begin, end = (int(self.positions[0, 0, at]) for at in (0, -1))
        rows, columns = self.positions.shape[2] - 1, ceil(keys / TILE_KEYS)
        counts = self.positions[0, 0].diff()
        there = torch.zeros(rows, columns, dtype=torch.float32)
        number = torch.arange(rows).repeat_interleave(counts)
        there[number, (self.tiles[begin:end, 0] >> 1).long()] = 1
        small = torch.nn.functional.adaptive_avg_pool2d(there[None], (min(rows, size // 2), min(columns, size)))[0]
        return "\n".join("".join(" ░▒▓█"[ceil(x * 4)] for x in line) for line in small.tolist())


@dataclass(frozen=True)
class Strips:
    """A mask [batch or 1, heads or 1, queries, keys] that `rows(begin, end)` makes for some queries at a time."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]


def tile_table(mask: Tensor | Strips, turned: bool = False, shared: bool = True) -> TileTable:
    """Returns the table of a mask [batch or 1, heads or 1, queries or 1, keys].

    mask    True where a query sees a key; or numbers to add to scores, minus infinity where a query does not see a key.
            Expanded dimensions are read once
    turned  whether to return the table of the transposed mask
    shared  whether tiles that add the same numbers share them, which takes some time to find out
    """
    found = _of_strips(mask, turned) if isinstance(mask, Strips) else _tiles(mask, turned, 2 if turned else 3)
    return listed(*found, shared)


_Tiles = tuple[tuple[int, ...], tuple[Array, ...], Array, Array | None]
"""The first arguments of `listed`."""


def _tiles(mask: Tensor, turned: bool, axes: int) -> _Tiles:
    """Returns the tiles of a mask. Those of its first `axes` that are expanded are read once."""
    for axis in range(axes):
        if mask.stride(axis) == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    mask = mask.detach().cpu()
    seen, added = (mask, None) if mask.dtype == torch.bool else _seen_and_added(mask.contiguous())
    if turned:
        mask, seen, added = mask.mT, None if seen is None else seen.mT, None if added is None else added.mT
    batch, heads, queries, keys = mask.shape
    shape = batch, heads, ceil(queries / TILE_QUERIES), ceil(keys / TILE_KEYS)
    there, words = _everything(shape, keys) if seen is None else _seen_tiles(shape, seen)
    floats = None
    if added is not None:
        padding = (0, shape[3] * TILE_KEYS - keys, 0, shape[2] * TILE_QUERIES - queries)
        whole = torch.nn.functional.pad(added, padding) if any(padding) else added
        whole[:, :, queries:] = whole[:, :, queries - 1 : queries]  # as their words: one row may stand for all queries
        tiled = whole.numpy().reshape(*shape[:3], TILE_QUERIES, shape[3], TILE_KEYS).transpose(0, 1, 2, 4, 5, 3)
        floats = tiled.copy().reshape(-1, *tiled.shape[4:]) if len(words) == prod(shape) else tiled[there]
    return shape[:3], there, words, floats


def _of_strips(mask: Strips, turned: bool) -> _Tiles:
    """Returns the tiles of all strips, in the order of the table."""
    batch, heads, queries, keys = mask.shape
    step = max(1, _STRIP // (batch * heads * keys * TILE_QUERIES)) * TILE_QUERIES
    axis, tile = (3, TILE_KEYS) if turned else (2, TILE_QUERIES)
    parts = []
    for begin in range(0, queries, step):
        shape, there, words, floats = _tiles(mask.rows(begin, min(begin + step, queries)), turned, 2)
        parts.append(([at + begin // tile if n == axis else at for n, at in enumerate(there)], words, floats))
    every = [np.concatenate(each) for each in zip(*(there for there, _, _ in parts), strict=True)]
    words = np.concatenate([words for _, words, _ in parts])
    floats = None
    if any(floats is not None for _, _, floats in parts):
        none = np.zeros((1, TILE_KEYS, TILE_QUERIES), dtype=np.float32)
        floats = np.concatenate([none.repeat(len(words), 0) if each is None else each for _, words, each in parts])
    order = np.lexsort(every[::-1])
    rows = ceil(keys / TILE_QUERIES) if turned else ceil(queries / TILE_QUERIES)
    there = tuple(each[order] for each in every)
    return (*shape[:2], rows), there, words[order], None if floats is None else floats[order]


def _everything(shape: tuple[int, ...], keys: int) -> tuple[tuple[Array, ...], Array]:
    """Returns all tiles, for a mask that hides nothing: batch, head, row and column of each, and its words."""
    there = np.unravel_index(np.arange(prod(shape)), shape)
    words = np.full((prod(shape), TILE_QUERIES), _ALL, dtype=np.uint16)
    if keys % TILE_KEYS:
        words[there[3] == shape[3] - 1] = (1 << keys % TILE_KEYS) - 1
    return there, words


def _seen_tiles(shape: tuple[int, ...], seen: Tensor) -> tuple[tuple[Array, ...], Array]:
    """Returns the tiles in which some key is seen, in the form of `_everything`."""
    batch, heads, rows, columns = shape
    queries = seen.shape[2]
    packed = np.packbits(seen.numpy(), axis=-1, bitorder="little")
    words = np.zeros((batch, heads, rows * TILE_QUERIES, columns * 2), dtype=np.uint8)
    words[:, :, :queries, : packed.shape[-1]] = packed
    words[:, :, queries:] = words[:, :, queries - 1 : queries]  # padding for queries that do not exist
    each = words.view(np.uint16).reshape(batch, heads, rows, TILE_QUERIES, columns)
    there = np.nonzero(np.bitwise_or.reduce(each, axis=3))
    return there, each.transpose(0, 1, 2, 4, 3)[there]


def listed(
    shape: tuple[int, ...], there: tuple[Array, ...], words: Array, floats: Array | None = None, shared: bool = True
) -> TileTable:
    """Returns the table of some tiles.

    shape   batch or 1, heads or 1, and rows of tiles
    there   batch, head, row and column of each tile; tiles are sorted by these
    words   uint16 [tiles, TILE_QUERIES]
    floats  [tiles, TILE_KEYS, TILE_QUERIES]; equal ones are kept once if `shared`
    """
    partial = (words != _ALL).any(-1)
    counts = np.bincount(np.ravel_multi_index(there[:3], shape), minlength=prod(shape)).reshape(shape)
    ends = counts.cumsum().reshape(shape)
    positions = np.concatenate([ends[..., :1] - counts[..., :1], ends], axis=-1)
    distinct, number = (_NONE, np.zeros(len(words), dtype=np.int64)) if floats is None else _distinct(floats, shared)
    tiles = np.stack([there[3] * 2 + partial, np.where(partial, partial.cumsum() - 1, 0), number], axis=-1, dtype=np.int32)
    return TileTable(
        torch.from_numpy(positions.astype(np.int32)),
        torch.from_numpy(tiles),
        torch.from_numpy(np.ascontiguousarray(words[partial]).view(np.int16)),
        torch.from_numpy(distinct),
    )


def _seen_and_added(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns where a mask of numbers hides nothing (None: everywhere), and the numbers that it adds, None if it adds none.

    The lowest numbers hide like minus infinity, unless they hide all keys of a query. Numbers from _ABSORBING on absorb the
    scores. If all keys of a query have such numbers, it sees equally all keys with the largest of them (ADDED_LOW, or
    FILLED_LOW). If a mask lowers all keys by less, the largest number is subtracted, because sums with it are not exact.
    """
    if not mask.numel():
        return mask > 0, None
    if float(mask.amin()) >= _LOWERED:
        return None, _unless_zero(mask.float())
    top, lowest = mask.amax(-1, keepdim=True), torch.finfo(mask.dtype).min / 2
    if bool(((top >= _LOWERED) | top.isneginf()).all()):
        hidden = mask <= lowest
        return ~hidden, _unless_zero(large_empty(mask.shape).copy_(mask).masked_fill_(hidden, 0))
    absorbs = (top <= max(lowest, _ABSORBING)) & ~top.isneginf()
    hidden = torch.where(absorbs, mask < top, mask <= lowest)
    moved = (top < _LOWERED) & ~absorbs & ~top.isneginf()
    added = mask.float() - torch.where(moved, top, 0).float()
    filled = torch.where(top == filling(mask.dtype), FILLED_LOW, ADDED_LOW)
    return ~hidden, _unless_zero(torch.where(absorbs, filled, added).masked_fill_(hidden, 0))


def _unless_zero(added: Tensor) -> Tensor | None:
    return None if float(added.amin()) == float(added.amax()) == 0 else added


def filling(dtype: torch.dtype) -> float:
    """Returns the number that masks of a dtype use for scores that were replaced by one equal number (masked_fill)."""
    return float(torch.tensor(FILLED_LOW if dtype != torch.float16 else -40000.0, dtype=dtype))


def _distinct(floats: Array, shared: bool) -> tuple[Array, Array]:
    """Returns the distinct tiles if `shared`, else all, and the number of each tile among them.

    Masks that depend only on distances have few distinct tiles.
    """
    floats = np.ascontiguousarray(floats, dtype=np.float32)
    if not shared:
        return floats, np.arange(len(floats))
    known: dict[bytes, int] = {}
    number = np.array([known.setdefault(tile.tobytes(), len(known)) for tile in floats], dtype=np.int64)
    return floats[np.unique(number, return_index=True)[1]], number
