"""Which tiles of queries and keys a mask leaves, as kernels read it (see dialects/attention.py)."""

from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.attention import TILE_KEYS, TILE_QUERIES

_ALL = 0xFFFF  # the word of a query that sees all keys of a tile


@dataclass(frozen=True)
class TileTable:
    """The tiles that a mask does not hide.

    positions  int32 [batch or 1, heads or 1, rows of tiles + 1]; one row of tiles where all queries see the same keys
    tiles      int32 [tiles, 2]
    words      int16 [tiles hidden in part, TILE_QUERIES]
    """

    positions: Tensor
    tiles: Tensor
    words: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [self.positions, self.tiles, self.words]

    def share(self, keys: int) -> float:
        """The share of all tiles that it has."""
        rows = self.positions.shape[0] * self.positions.shape[1] * (self.positions.shape[2] - 1)
        return self.tiles.shape[0] / max(1, rows * ceil(keys / TILE_KEYS))

    def picture(self, keys: int, size: int = 24) -> str:
        """The tiles of the first batch and head, a character for as many as fit: " " none, "░▒▓" some, "█" all."""
        begin, end = (int(self.positions[0, 0, at]) for at in (0, -1))
        rows, columns = self.positions.shape[2] - 1, ceil(keys / TILE_KEYS)
        counts = self.positions[0, 0].diff()
        there = torch.zeros(rows, columns)
        number = torch.arange(rows).repeat_interleave(counts)
        there[number, (self.tiles[begin:end, 0] >> 1).long()] = 1
        small = torch.nn.functional.adaptive_avg_pool2d(there[None], (min(rows, size // 2), min(columns, size)))[0]
        return "\n".join("".join(" ░▒▓█"[ceil(x * 4)] for x in line) for line in small.tolist())


def tile_table(mask: Tensor) -> TileTable:
    """The table of a mask: bool [batch or 1, heads or 1, queries or 1, keys], True where a query sees a key.

    Dimensions that are expanded are looked at once.
    """
    for axis in range(3):
        if mask.stride(axis) == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    batch, heads, queries, keys = mask.shape
    rows, columns = ceil(queries / TILE_QUERIES), ceil(keys / TILE_KEYS)
    packed = np.packbits(mask.detach().cpu().numpy(), axis=-1, bitorder="little")
    words = np.zeros((batch, heads, rows * TILE_QUERIES, columns * 2), dtype=np.uint8)
    words[:, :, :queries, : packed.shape[-1]] = packed
    words[:, :, queries:] = words[:, :, queries - 1 : queries]  # what stands in for queries that are not there
    each = words.view(np.uint16).reshape(batch, heads, rows, TILE_QUERIES, columns)
    some = np.bitwise_or.reduce(each, axis=3) != 0
    partial = some & (np.bitwise_and.reduce(each, axis=3) != _ALL)
    counts = some.sum(axis=-1, dtype=np.int64)
    ends = counts.cumsum().reshape(counts.shape)
    positions = np.concatenate([ends[..., :1] - counts[..., :1], ends], axis=-1)
    there = np.nonzero(some)
    in_part = partial[there]
    tiles = np.stack([there[3] * 2 + in_part, np.where(in_part, in_part.cumsum() - 1, 0)], axis=-1)
    chosen = each.transpose(0, 1, 2, 4, 3)[partial]
    return TileTable(
        torch.from_numpy(positions.astype(np.int32)),
        torch.from_numpy(tiles.astype(np.int32).reshape(-1, 2)),
        torch.from_numpy(np.ascontiguousarray(chosen).view(np.int16)),
    )
