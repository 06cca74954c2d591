"""Runs FlexAttention by tiles. If their inputs change, the BlockMask and its functions are evaluated again to find the tiles.

    gossamer::attend_flex(q, k, v, leaves, numbers, scale, key) → out, logarithms
    gossamer::attend_flex_backward(upstream, of_logarithms, q, k, v, out, logarithms, leaves, numbers, scale, key) → gradients

The `FlexMask` under `key` (computed.py) computes the mask's blocks and the buffers of its functions from `leaves` and
`numbers`. `logarithms` are those of the sums of exponentials, to base 2, in f32. For queries that see no key, `out` is 0 and
the logarithm is minus infinity. See torch.nn.attention.flex_attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, fx

from gossamer.backend.graph.expressions import content_key
from gossamer.backend.run import mask_ops
from gossamer.backend.run.computed import LEAVES, Computed, known
from gossamer.dialects.attention import TILE_KEYS, TILE_QUERIES, Step
from gossamer.runtime.operations import Operation
from gossamer.sparsity.attention.masked_attention import Scoring, attend, fake, fake_backward, gradients
from gossamer.sparsity.attention.tile_table import TileTable, listed

_AT_ONCE = 1 << 20  # pairs of queries and keys whose mask is in memory at one time
_EDGE = 256  # a block with all queries or keys is split into parts of so many, which are whole tiles


@dataclass(eq=False)
class FlexMask(Computed):
    """The mask and the score function of a FlexAttention.

    evaluate  leaves and numbers → counts and indices of the masked blocks and of the full ones, as in a BlockMask, then the
              buffers of `mask`, then those of `shown` and `added`
    buffers   the number of buffers of `mask`
    mask      (batch, head, query, key, buffers...) → whether the query sees the key, for indices that broadcast. It holds
              in masked blocks only
    shown     the same of the score function, which holds in all blocks; None if it hides no key
    added     with the same arguments: the number added to the score; None for nothing
    hides     whether adding minus infinity hides a key; it does not if a bounded function follows
    score     the steps of the score function
    block     the numbers of queries and keys of a block
    """

    most: ClassVar[int | None] = 16

    buffers: int
    mask: fx.GraphModule
    shown: fx.GraphModule | None
    added: fx.GraphModule | None
    hides: bool
    score: tuple[Step, ...]
    block: tuple[int, int]

    @property
    def key(self) -> str:
        """A hash of all fields."""
        codes = [None if function is None else function.code for function in (self.mask, self.shown, self.added)]
        more = codes, self.buffers, self.hides, self.score, self.block, self.compared
        return content_key(self.evaluate, *more)

    def table(self, leaves: Sequence[Tensor], numbers: Sequence[int], q: Tensor, k: Tensor, turned: bool = False) -> TileTable:
        """Returns the tiles for these leaves, and for tensors of these sizes. With `turned`, rows are keys, not queries."""
        size = *q.shape[:3], k.shape[2]
        key = (*numbers, *size, turned)
        found: TileTable = self.remembered(leaves, key, lambda: self._listed(leaves, numbers, size, turned))
        return found

    def unseeing(self, leaves: Sequence[Tensor], numbers: Sequence[int], q: Tensor, k: Tensor) -> Tensor:
        """Returns which queries see no key: bools [batch or 1, heads or 1, queries]."""
        table, size = self.table(leaves, numbers, q, k), (*q.shape[:3], k.shape[2])
        found: Tensor = self.remembered(leaves, (*numbers, *size, "unseeing"), lambda: table.unseeing()[..., : q.shape[2]])
        return found

    def _listed(self, leaves: Sequence[Tensor], numbers: Sequence[int], size: Sequence[int], turned: bool) -> TileTable:
        batch, heads, *lengths = size
        masked, indices, seen, seen_indices, *buffers = self.values(leaves, numbers)
        own, of_score = buffers[: self.buffers], buffers[self.buffers :]
        functions = [(self.mask, own), (self.shown, of_score), (self.added, of_score)]
        shape = [
            whole if any(function is not None and _uses(function, axis) for function, _ in functions) else masked.shape[axis]
            for axis, whole in enumerate((batch, heads))
        ]
        block = [b if b < n else _EDGE for b, n in zip(self.block, lengths, strict=True)]  # a single block is split into parts
        found: list[tuple[Any, ...]] = []
        with torch.no_grad():
            for counts, at, is_masked in ((masked, indices, True), (seen, seen_indices, False)):
                if counts is not None:
                    blocks = _blocks(counts.expand(*shape, -1), at.expand(*shape, -1, -1), self.block, lengths)
                    blocks = _parted(blocks, self.block, lengths)
                    used = functions if is_masked else [(None, own), *functions[1:]]
                    parts = blocks.split(max(1, _AT_ONCE // (block[0] * block[1])))
                    found += [self._tiles(part, block, lengths, used, turned) for part in parts]
        there, words, floats = (np.concatenate([each[i] for each in found], axis=1 if i == 0 else 0) for i in range(3))
        order = np.lexsort(there[::-1])
        rows = ceil(lengths[turned] / TILE_QUERIES)
        return listed(
            (shape[0], shape[1], rows), tuple(there[:, order]), words[order], floats[order] if self.added is not None else None
        )

    def _tiles(
        self, blocks: Tensor, block: Sequence[int], lengths: Sequence[int], functions: Sequence[Any], turned: bool
    ) -> tuple[Any, ...]:
        """Returns the indices of the tiles of blocks [n, 4] as [4, tiles], their mask words, and their added numbers."""
        places = [blocks[:, 2 + axis, None] * block[axis] + torch.arange(block[axis]) for axis in (0, 1)]
        within = [place.clamp(max=length - 1).int() for place, length in zip(places, lengths, strict=True)]
        of_heads = blocks[:, 0].int(), blocks[:, 1].int()
        *visible, added = (None if f is None else _everywhere(f, buffers, (*of_heads, *within)) for f, buffers in functions)
        row, column = (1, 0) if turned else (0, 1)  # axes of places
        inside = (places[row] // TILE_QUERIES < ceil(lengths[row] / TILE_QUERIES))[
            :, :, None
        ]  # all rows of whole tiles, even those that fill up the last tile
        sees = inside & (places[column] < lengths[column])[:, None]
        for mask in visible:
            if mask is not None:
                sees = sees & (mask.mT if turned else mask)
        if added is not None:
            added = added.mT if turned else added
            sees = sees & ~added.isneginf() if self.hides else sees
        inner = block[row] // TILE_QUERIES, TILE_QUERIES, block[column] // TILE_KEYS, TILE_KEYS
        words = np.packbits(sees.numpy().reshape(-1, *inner), axis=-1, bitorder="little").view(np.uint16)[..., 0]
        words = words.transpose(0, 1, 3, 2)
        n, of_row, of_column = np.nonzero(words.any(-1))
        first = blocks.numpy()[n].T
        there = np.stack([*first[:2], first[2 + row] * inner[0] + of_row, first[2 + column] * inner[2] + of_column])
        if added is None:
            return there, words[n, of_row, of_column], np.zeros((len(n), 0))
        shown = added.float().where(sees, 0).numpy().reshape(-1, *inner)[n, of_row, :, of_column]
        return there, words[n, of_row, of_column], shown.transpose(0, 2, 1)


def _uses(function: fx.GraphModule, axis: int) -> bool:
    return len([node for node in function.graph.nodes if node.op == "placeholder"][axis].users) > 0


def _everywhere(function: fx.GraphModule, buffers: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Returns [n, queries, keys]: a function of batches [n], heads [n], queries [n, queries] and keys [n, keys]."""
    batch, head, query, key = places
    value = torch.as_tensor(function(batch[:, None, None], head[:, None, None], query[:, :, None], key[:, None], *buffers))
    return value.expand(len(query), query.shape[1], key.shape[1])


def _blocks(counts: Tensor, indices: Tensor, block: Sequence[int], size: Sequence[int]) -> Tensor:
    """Returns batch, head, row and column [n, 4] of the listed blocks, without blocks that have no queries.

    Raises ValueError if the BlockMask lists a block of keys that does not exist."""
    listed_here = torch.arange(indices.shape[-1]) < counts[..., None]
    b, h, row, at = listed_here.nonzero(as_tuple=True)
    column = indices[b, h, row, at]
    if len(column) and not (int(column.min()) >= 0 and int(column.max()) < ceil(size[1] / block[1])):
        raise ValueError(
            f"a BlockMask lists block {int(column.max())} of keys, there are {ceil(size[1] / block[1])} of {block[1]} keys each"
        )
    blocks = torch.stack([b, h, row, column], dim=1)
    return blocks[row * block[0] < size[0]]


def _parted(blocks: Tensor, block: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Returns blocks [n, 4]. Splits blocks that have all queries or all keys into parts of _EDGE."""
    for axis in (0, 1):
        if block[axis] >= lengths[axis]:
            parts = torch.arange(ceil(lengths[axis] / _EDGE))
            blocks, numbers = blocks.repeat_interleave(len(parts), 0), parts.repeat(len(blocks))
            blocks[:, 2 + axis] = numbers
    return blocks


def _attend(
    q: Tensor, k: Tensor, v: Tensor, leaves: list[Tensor], numbers: list[int], scale: float, key: str
) -> tuple[Tensor, Tensor]:
    mask: FlexMask = known(key)
    out, statistics = attend(q, k, v, mask.table(leaves, numbers, q, k), Scoring(scale), mask.score)
    return out, (statistics / log(2)).masked_fill_(mask.unseeing(leaves, numbers, q, k), -inf)


def _attend_backward(
    upstream: Tensor,
    of_logarithms: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    leaves: list[Tensor],
    numbers: list[int],
    scale: float,
    key: str,
) -> tuple[Tensor, Tensor, Tensor]:
    mask: FlexMask = known(key)
    tables = mask.table(leaves, numbers, q, k), mask.table(leaves, numbers, q, k, turned=True)
    statistics = (logarithms * log(2)).masked_fill_(logarithms.isneginf(), 0)
    more = None if of_logarithms is None else of_logarithms / log(2)
    return gradients(upstream, (q, k, v), out, statistics, tables, Scoring(scale), mask.score, more)


_MASK = f"{LEAVES}, float scale, str key"
_SAVED = f"Tensor upstream, Tensor? of_logarithms, {mask_ops.GIVEN}, Tensor out, Tensor logarithms"
attend_flex = Operation(f"attend_flex({mask_ops.GIVEN}, {_MASK}) -> (Tensor, Tensor)", _attend, fake=fake).register()
attend_flex_backward = Operation(
    f"attend_flex_backward({_SAVED}, {_MASK}) -> (Tensor, Tensor, Tensor)",
    _attend_backward,
    fake=lambda upstream, _, *given: fake_backward(upstream, *given),
).register()
mask_ops.OPERATIONS.update((attend_flex, attend_flex_backward))
