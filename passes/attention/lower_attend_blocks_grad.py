"""lower-attend-blocks-grad: the gradients of `kernel.attend_blocks`, each a loop over tiles of what it is the gradient of.

before   %dq = "kernel.attend_blocks_of_queries"(%q, %k, %v, %gradient, %statistics, %delta, ...)
after    scf.parallel (%task) = ...                           // batch x heads x tiles of 32 queries
           for each few tiles of 16 keys that the table lists
             p[key][query] = exp(<k, q> * scale - statistics), 0 where hidden
             s[key][query] = p * (<v, gradient> - delta)
             sums[d][query] += sum_key k[key][d] s[key][query]
           sums * scale into %dq

For keys and values the same, with keys in the lanes and the queries of all heads that share them one after the other. The
scores are computed again (Dao et al., "FlashAttention", 2022), once for each of the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.attention import TILE_KEYS, TILE_QUERIES
from gossamer.passes.attention.block_rows import BlockRows, Entry
from gossamer.passes.attention.query_tile import Rows
from gossamer.passes.finish.expand_math import exp_below_zero
from gossamer.passes.loops.buffers import buffer_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, loop, mask_of, splat_of, zeros

PerRow = Callable[[ir.Value], tuple[list[ir.Value], list[ir.Value]]]
"""Statistics and delta of the queries, for a row of the other side: vectors a tile."""


@dataclass(frozen=True)
class LowerAttendBlocksGrad:
    """`bits` is the width of the target's vectors."""

    name: ClassVar[str] = "lower-attend-blocks-grad"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for side, lowering in (("queries", _OfQueries), ("keys", _OfKeys)):
            for op in walk(module, f"kernel.attend_blocks_of_{side}"):
                with op.location:
                    lowering(op.opview, self.bits).lower(module)


class _Gradient(BlockRows):
    def weights(
        self,
        start: ir.Value,
        count: ir.Value,
        others: tuple[Rows, Rows],
        turned: tuple[ir.Value, ir.Value],
        of_query: PerRow,
        made: tuple[ir.Value, ir.Value],
    ) -> None:
        """p and s of `count` tiles from `start` on, into the memories `made`, which may be one for s alone.

        others  what the products of the scores and those with the gradient are of: keys and values, or queries and gradients
        turned  the same of the tile in lanes
        """
        with loop(index(0), count, index(1)) as tiles:
            entry = self.entry(arith.addi(start, tiles.induction_variable))
            slot = arith.muli(tiles.induction_variable, index(TILE_KEYS))
            choice = scf.IfOp(entry.partial, has_else=True)
            for block, masked in ((choice.then_block, True), (choice.else_block, False)):
                with ir.InsertionPoint(block):
                    self._tile_weights(entry, masked, slot, others, turned, of_query, made)
                    scf.YieldOp([])

    def _tile_weights(
        self,
        entry: Entry,
        masked: bool,
        slot: ir.Value,
        others: tuple[Rows, Rows],
        turned: tuple[ir.Value, ir.Value],
        of_query: PerRow,
        made: tuple[ir.Value, ir.Value],
    ) -> None:
        tile = self.tile
        seen = self.seen(entry.words) if masked else None
        with loop(index(0), index(TILE_KEYS), index(tile.at_once)) as rows:
            numbers = [arith.addi(rows.induction_variable, index(n)) for n in range(tile.at_once)]
            scores, gradients = (
                tile.products(other.memory, [other.at(arith.addi(entry.key, number)) for number in numbers], own)
                for other, own in zip(others, turned, strict=True)
            )
            for number, products, gradient in zip(numbers, scores, gradients, strict=True):
                score, derivatives = self.scored(products, arith.addi(entry.floats, number))
                statistics, delta = of_query(arith.addi(entry.key, number))
                p = [exp_below_zero(arith.subf(a, b)) for a, b in zip(score, statistics, strict=True)]
                s = [arith.mulf(a, arith.subf(g, d)) for a, g, d in zip(p, gradient, delta, strict=True)]
                if derivatives is not None:
                    s = [arith.mulf(a, b) for a, b in zip(s, derivatives, strict=True)]
                if seen is not None:  # last of all: what is hidden may be NaN
                    p, s = (self.hidden(each, seen, number, 0.0) for each in (p, s))
                for values, memory in zip((p, s), made, strict=True):  # in this order: s stays where both go to one
                    tile.store(values, memory, arith.addi(slot, number))

    def add(self, sums: ir.Value, start: ir.Value, count: ir.Value, others: Rows, weights: ir.Value) -> None:
        """sums += the other rows of `count` tiles, weighted."""

        def place_of(group: ir.Value, number: ir.Value) -> tuple[ir.Value, ir.Value]:
            return others.memory, others.at(arith.addi(self.first_key(arith.addi(start, group)), number))

        def partial(group: ir.Value) -> ir.Value:
            return self.partial(arith.addi(start, group))

        self.tile.add_weighted(sums, None, count, weights, TILE_KEYS, place_of, partial)

    def scales(self) -> list[ir.Value]:
        return [splat_of(self.tile.vec, self.scale)] * self.tile.vectors

    def per_query(self) -> tuple[ir.Value, ir.Value]:
        """The memories of statistics and delta."""
        return buffer_of(self.op.statistics), buffer_of(self.op.delta)


class _OfQueries(_Gradient):
    def lower(self, module: ir.Module) -> None:
        """Put loops in place of the op."""
        padded = self.tile.padded
        self.replace(module, "queries", "heads", [padded, padded, padded, self.chunk * TILE_KEYS], self._row)

    def _row(self, batch: ir.Value, head: ir.Value, row: ir.Value, scratch: list[ir.Value]) -> None:
        tile, (turned, gradients, sums, scores) = self.tile, scratch
        first, shared = arith.muli(row, index(TILE_QUERIES)), arith.divui(head, self.sizes["group"])
        k, v = self.rows("k", batch, shared, "keys"), self.rows("v", batch, shared, "keys")
        tile.turn(self.rows("q", batch, head, "queries"), first, turned, self.scales()[0])
        tile.turn(self.rows("gradient", batch, head, "queries"), first, gradients, splat_of(tile.vec, 1.0))
        tile.clear(sums)
        statistics, delta = (self._lanes(memory, self.pair(batch, head), first) for memory in self.per_query())
        with loop(*self.listed(batch, head, row), index(self.chunk)) as chunks:
            start = chunks.induction_variable
            count = arith.minui(arith.subi(self.listed(batch, head, row)[1], start), index(self.chunk))
            of_query = lambda _: (statistics, delta)
            self.weights(start, count, (k, v), (turned, gradients), of_query, (scores, scores))
            self.add(sums, start, count, k, scores)
        tile.scale(sums, self.scales())
        tile.turn_back(sums, self.rows("of_q", batch, head, "queries"), first)

    def _lanes(self, memory: ir.Value, pair: ir.Value, first: ir.Value) -> list[ir.Value]:
        """The values of the queries in lanes."""
        tile, queries = self.tile, self.sizes["queries"]
        base, left = arith.addi(arith.muli(pair, queries), first), arith.subi(queries, first)
        found = []
        for v in range(tile.vectors):
            behind = index(v * tile.lanes)
            mask = mask_of(tile.lanes, arith.subi(arith.maxui(left, behind), behind))
            found.append(vector.maskedload(tile.vec, memory, [arith.addi(base, behind)], mask, zeros(tile.vec)))
        return found


class _OfKeys(_Gradient):
    def lower(self, module: ir.Module) -> None:
        """Put loops in place of the op."""
        scratch = [*[self.tile.padded] * 4, *[self.chunk * TILE_KEYS] * 2]
        self.replace(module, "keys", "kv_heads", scratch, self._row)

    def _row(self, batch: ir.Value, head: ir.Value, row: ir.Value, scratch: list[ir.Value]) -> None:
        tile, (keys, values, of_k, of_v, p, s) = self.tile, scratch
        first = arith.muli(row, index(TILE_QUERIES))
        tile.turn(self.rows("k", batch, head, "keys"), first, keys, self.scales()[0])
        tile.turn(self.rows("v", batch, head, "keys"), first, values, splat_of(tile.vec, 1.0))
        tile.clear(of_k)
        tile.clear(of_v)
        with loop(index(0), self.sizes["group"], index(1)) as group:
            own = arith.addi(arith.muli(head, self.sizes["group"]), group.induction_variable)
            q, gradient = self.rows("q", batch, own, "queries"), self.rows("gradient", batch, own, "queries")
            base = arith.muli(self.pair(batch, own), self.sizes["queries"])
            begin, end = self.listed(batch, own, row)
            with loop(begin, end, index(self.chunk)) as chunks:
                start = chunks.induction_variable
                count = arith.minui(arith.subi(end, start), index(self.chunk))
                self.weights(start, count, (q, gradient), (keys, values), self._of_query(base), (p, s))
                self.add(of_v, start, count, gradient, p)
                self.add(of_k, start, count, q, s)
        tile.scale(of_k, self.scales())
        tile.turn_back(of_k, self.rows("of_k", batch, head, "keys"), first)
        tile.turn_back(of_v, self.rows("of_v", batch, head, "keys"), first)

    def _of_query(self, base: ir.Value) -> PerRow:
        last = arith.subi(self.sizes["queries"], index(1))

        def read(query: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
            at = arith.addi(base, arith.minui(query, last))
            statistics, delta = (
                [vector.broadcast(self.tile.vec, memref.load(memory, [at]))] * self.tile.vectors for memory in self.per_query()
            )
            return statistics, delta

        return read
