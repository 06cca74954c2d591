"""Cuts a chain's tokens into tiles, and shares the tiles out among threads. No tile spans two sequences.

If weights are expanded, a thread takes several tiles through a stage together, so that it expands the weights once. These tiles
have equally many tokens. So the whole tiles of all sequences have the first numbers, then the last tile of each sequence.

    tiles one by one   sequence 0: 0 1 2, sequence 1: 3 4 5        three tiles in each sequence, the last not whole
    together           sequence 0: 0 1 4, sequence 1: 2 3 5        tasks 0 1, 2 3, 4 5
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith

from gossamer.passes.chains.plan_chain import Chain, Stage
from gossamer.passes.framework.chain_product import Expansion
from gossamer.passes.loops.vectors import index, loop, parallel

_TOGETHER = 4  # most tiles of a task
_SECOND_LEVEL = 5 << 19  # bytes: CPUs with AMX have 2 MB, but not all memory of a tile is in use at once


@dataclass(frozen=True)
class Tile:
    """A tile at run time.

    number    its number, over all sequences
    slot      number of the private memory that it uses
    first     its first token
    valid     number of its tokens
    sequence  number of its sequence
    within    its first token, counted in its sequence
    """

    number: ir.Value
    slot: ir.Value
    first: ir.Value
    valid: ir.Value
    sequence: ir.Value
    within: ir.Value


def expansion(stage: Stage) -> Expansion | None:
    """Returns how a product expands its weights; None if it does not."""
    return None if stage.product is None else stage.product.expansion


def together_of(chain: Chain) -> int:
    """Returns the most tiles that go through a stage together, so that weights are expanded once for all of them.

    It is limited by the second-level cache.
    """
    if all(expansion(stage) is None for stage in chain.stages):
        return 1
    return max(1, min(_TOGETHER, _SECOND_LEVEL // chain.private_bytes))


class Tiling:
    """The tiles, of `tokens` tokens, of sequences with `length` of `total` tokens. A task has up to `together` tiles."""

    def __init__(self, tokens: int, together: int, total: ir.Value, length: ir.Value, threads: ir.Value) -> None:
        self.tokens, self.together, self.length = tokens, together, length
        self.per_sequence = arith.ceildivui(length, index(tokens))
        self.sequences = arith.divui(total, length)
        self.tiles = arith.muli(self.sequences, self.per_sequence)
        if together == 1:
            return
        self.whole = arith.divui(length, index(tokens))  # whole tiles of a sequence
        self.all_whole = arith.muli(self.sequences, self.whole)
        share = arith.divui(self.tiles, threads)
        self.share = arith.maxui(arith.minui(share, index(together)), index(1))
        self.whole_tasks = arith.ceildivui(self.all_whole, self.share)

    @contextmanager
    def tasks(self) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Makes a parallel loop over tasks. Yields a task's first tile, and the number of its tiles."""
        if self.together == 1:
            with parallel(self.tiles) as task:
                yield task, index(1)
            return
        left = arith.ceildivui(arith.subi(self.tiles, self.all_whole), self.share)
        with parallel(arith.addi(self.whole_tasks, left)) as task:
            is_whole = arith.cmpi(arith.CmpIPredicate.ult, task, self.whole_tasks)
            later = arith.addi(self.all_whole, arith.muli(arith.subi(task, self.whole_tasks), self.share))
            first = arith.select(is_whole, arith.muli(task, self.share), later)
            end = arith.select(is_whole, self.all_whole, self.tiles)
            yield first, arith.minui(self.share, arith.subi(end, first))

    @contextmanager
    def each(self, first: ir.Value, count: ir.Value, slot: ir.Value) -> Iterator[Tile]:
        """Makes a loop over the tiles of a task. Each has its own private memory, from `slot` on."""
        with loop(index(0), count, index(1)) as tiles:
            at = tiles.induction_variable
            yield self.tile(arith.addi(first, at), arith.addi(slot, at))

    def tile(self, number: ir.Value, slot: ir.Value) -> Tile:
        """Returns the tile with a number."""
        if self.together == 1:
            sequence = arith.divui(number, self.per_sequence)
            place = arith.remui(number, self.per_sequence)
        else:
            is_whole = arith.cmpi(arith.CmpIPredicate.ult, number, self.all_whole)
            whole = arith.maxui(self.whole, index(1))
            sequence = arith.select(is_whole, arith.divui(number, whole), arith.subi(number, self.all_whole))
            place = arith.select(is_whole, arith.remui(number, whole), self.whole)
        within = arith.muli(place, index(self.tokens))
        first = arith.addi(arith.muli(sequence, self.length), within)
        valid = arith.minui(index(self.tokens), arith.subi(self.length, within))
        return Tile(number, slot, first, valid, sequence, within)

    def of_sequence(self, tile: Tile) -> list[ir.Value]:
        """Returns the number of the first tile of a tile's sequence. If tasks have several tiles, also how many whole tiles the
        sequence has, and the number of its last tile, counted from the first."""
        if self.together == 1:
            return [arith.subi(tile.number, arith.divui(tile.within, index(self.tokens)))]
        first = arith.muli(tile.sequence, self.whole)
        return [first, self.whole, arith.subi(arith.addi(self.all_whole, tile.sequence), first)]
