"""FlexAttention by tiles: the tiles that a BlockMask and its functions leave are found when what they are computed from is new.

    gossamer::attend_flex(q, k, v, leaves, numbers, scale, key) → out

`leaves` and `numbers` are what the mask's blocks and the buffers of its functions are computed from, `key` is the hash under
which this process knows how. Queries that see no key get 0. See torch.nn.attention.flex_attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.backend.calls import mask_ops
from gossamer.backend.graph.expressions import content_key, evaluated
from gossamer.dialects.attention import TILE_KEYS, TILE_QUERIES, Step
from gossamer.runtime.operations import LIBRARY, TAGS, implement
from gossamer.runtime.remembered import Compared, Remembered
from gossamer.sparsity.attention.masked_attention import attend, fake
from gossamer.sparsity.attention.tile_table import TileTable, listed

_AT_ONCE = 1 << 20  # pairs of queries and keys whose mask is in memory


@dataclass(frozen=True, eq=False)
class FlexMask(mask_ops.Shared):
    """What FlexAttention does to scores, and which it looks at.

    evaluate  leaves and numbers → numbers and indices of the blocks that are masked and of those that are not (as a BlockMask
              has them), the buffers of `mask` and those of `added`
    buffers   how many `mask` has
    mask      (batch, head, query, key, buffers...) → whether the query sees the key, of places that are broadcast
    added     likewise, what is added to the score; None for nothing
    hides     whether minus infinity, added, hides a key: not if a function with bounds follows
    score     the steps of the score function
    block     queries and keys of a block
    compared  of which leaves the values are compared
    """

    evaluate: fx.GraphModule
    buffers: int
    mask: fx.GraphModule
    added: fx.GraphModule | None
    hides: bool
    score: tuple[Step, ...]
    block: tuple[int, int]
    compared: Compared

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tables", Remembered[TileTable](self.compared, most=16))

    def __reduce__(self) -> tuple[Any, ...]:
        return FlexMask, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def key(self) -> str:
        """A hash of all that it is."""
        added = self.added.code if self.added is not None else ""
        more = self.mask.code, added, self.buffers, self.hides, self.score, self.block, self.compared
        return content_key(self.evaluate, *more)

    def table(self, leaves: Sequence[Tensor], numbers: Sequence[int], q: Tensor, k: Tensor) -> TileTable:
        """The tiles for these leaves, and for tensors of these sizes."""
        size = *q.shape[:3], k.shape[2]
        tables: Remembered[TileTable] = self._tables  # type: ignore[attr-defined]
        return tables.get(leaves, (*numbers, *size), lambda: self._listed(leaves, numbers, size))

    def _listed(self, leaves: Sequence[Tensor], numbers: Sequence[int], size: Sequence[int]) -> TileTable:
        batch, heads, queries, keys = size
        masked, indices, seen, seen_indices, *buffers = evaluated(self.evaluate, leaves, numbers)
        functions = [(self.mask, buffers[: self.buffers]), (self.added, buffers[self.buffers :])]
        shape = [
            whole if any(function is not None and _uses(function, axis) for function, _ in functions) else masked.shape[axis]
            for axis, whole in enumerate((batch, heads))
        ]
        block = [
            min(b, ceil(n / t) * t) for b, n, t in zip(self.block, (queries, keys), (TILE_QUERIES, TILE_KEYS), strict=True)
        ]
        found: list[tuple[Any, ...]] = []
        with torch.no_grad():
            for counts, at, is_masked in ((masked, indices, True), (seen, seen_indices, False)):
                if counts is not None:
                    blocks = _blocks(counts.expand(*shape, -1), at.expand(*shape, -1, -1), block, (queries, keys))
                    used = functions if is_masked else [None, functions[1]]
                    parts = blocks.split(max(1, _AT_ONCE // (block[0] * block[1])))
                    found += [self._tiles(part, block, (queries, keys), used) for part in parts]
        there, words, floats = (np.concatenate([each[i] for each in found], axis=1 if i == 0 else 0) for i in range(3))
        order = np.lexsort(there[::-1])
        rows = ceil(queries / TILE_QUERIES)
        return listed(
            (shape[0], shape[1], rows), tuple(there[:, order]), words[order], floats[order] if self.added is not None else None
        )

    def _tiles(self, blocks: Tensor, block: Sequence[int], size: tuple[int, int], functions: Sequence[Any]) -> tuple[Any, ...]:
        """Of blocks [n, 4] the places of their tiles [4, tiles], words and floats."""
        queries, keys = size
        query = blocks[:, 2:3] * block[0] + torch.arange(block[0])
        key = blocks[:, 3:4] * block[1] + torch.arange(block[1])
        places = [x.int() for x in (blocks[:, 0], blocks[:, 1], query.clamp(max=queries - 1), key.clamp(max=keys - 1))]
        mask, added = (None if f is None or f[0] is None else _everywhere(f[0], f[1], places) for f in functions)
        inside = (query // TILE_QUERIES < ceil(queries / TILE_QUERIES))[:, :, None]  # with those that fill up the last tile
        sees = inside & (key < keys)[:, None]
        sees = sees if mask is None else sees & mask
        if added is not None and self.hides:
            sees = sees & ~added.isneginf()
        inner = block[0] // TILE_QUERIES, TILE_QUERIES, block[1] // TILE_KEYS, TILE_KEYS
        words = np.packbits(sees.numpy().reshape(-1, *inner), axis=-1, bitorder="little").view(np.uint16)[..., 0]
        words = words.transpose(0, 1, 3, 2)
        n, row, column = np.nonzero(words.any(-1))
        b, h, first_row, first_column = blocks.numpy()[n].T
        there = np.stack([b, h, first_row * inner[0] + row, first_column * inner[2] + column])
        if added is None:
            return there, words[n, row, column], np.zeros((len(n), 0))
        shown = added.float().where(sees, 0).numpy().reshape(-1, *inner)[n, row, :, column]
        return there, words[n, row, column], shown.transpose(0, 2, 1)


def _uses(function: fx.GraphModule, axis: int) -> bool:
    return len([node for node in function.graph.nodes if node.op == "placeholder"][axis].users) > 0


def _everywhere(function: fx.GraphModule, buffers: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """The values [n, queries, keys] of a function of batch, head, query and key."""

    batch, head, query, key = places
    value = torch.as_tensor(function(batch[:, None, None], head[:, None, None], query[:, :, None], key[:, None], *buffers))
    return value.expand(len(query), query.shape[1], key.shape[1])


def _blocks(counts: Tensor, indices: Tensor, block: Sequence[int], size: tuple[int, int]) -> Tensor:
    """Batch, head, row and column [n, 4] of the blocks that are listed; those of no query are left out."""
    listed_here = torch.arange(indices.shape[-1]) < counts[..., None]
    b, h, row, at = listed_here.nonzero(as_tuple=True)
    column = indices[b, h, row, at]
    if len(column) and not (int(column.min()) >= 0 and int(column.max()) < ceil(size[1] / block[1])):
        raise ValueError(
            f"a BlockMask lists block {int(column.max())} of keys, there are {ceil(size[1] / block[1])} of {block[1]} keys each"
        )
    blocks = torch.stack([b, h, row, column], dim=1)
    return blocks[row * block[0] < size[0]]


def _attend(q: Tensor, k: Tensor, v: Tensor, leaves: list[Tensor], numbers: list[int], scale: float, key: str) -> Tensor:
    mask: FlexMask = mask_ops.known(key)
    return attend(q, k, v, mask.table(leaves, numbers, q, k), scale, mask.score)[0]


LIBRARY.define(f"attend_flex({mask_ops.GIVEN}, {mask_ops.LEAVES}, str key) -> Tensor", tags=TAGS)
implement("attend_flex", _attend)
torch.library.register_fake("gossamer::attend_flex", lambda q, *_: fake(q)[0], lib=LIBRARY)
mask_ops.OPERATIONS.add(attend_flex := torch.ops.gossamer.attend_flex.default)
