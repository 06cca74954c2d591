"""lower-attend-blocks: lowers a `kernel.attend_blocks` to one loop over tiles of queries, which visits their tiles of keys.

before   %y, %s = "kernel.attend_blocks"(%q, %k, %v, %positions, %tiles, %words, ...) {head_size = 64, scale = 0.125}
after    scf.parallel (%task) = ...                           // batch x heads x tiles of 32 queries
           turned[d][query] = q[query][d] * scale
           for each few tiles of 16 keys that the table lists
             scores[key][query] = sum_d k[key][d] turned[d][query]     // -inf for hidden ones, if the tile is partly hidden
             scores = exp(scores - largest), total; then dropout
             sums[d][query] = sums * exp(largest before - largest) + sum_key v[key][d] scores[key][query]
           sums / total into y, largest + log(total) into s

Softmax is computed online (online_softmax.py). Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, math, scf, vector

from gossamer.dialects.attention import ADD, LOW, TILE_KEYS, TILE_QUERIES
from gossamer.passes.attention.block_rows import BlockRows, Entry
from gossamer.passes.attention.query_tile import Rows, WeightedRows
from gossamer.passes.codegen.online_softmax import Running, along, larger, power
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import (
    index,
    loop,
    mask_of,
    splat_of,
    zeros,
)


@dataclass(frozen=True)
class LowerAttendBlocks:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.attend_blocks"):
            with op.location:
                _Attend(op.opview, self.bits).lower(module)


class _Attend(BlockRows):
    def __init__(self, op: Any, bits: int) -> None:
        super().__init__(op, bits)
        self.statistics = self.storage.outputs[1]

    def lower(self, module: ir.Module) -> None:
        """Replaces the op by loops."""
        scratch = [self.tile.padded, self.tile.padded, self.chunk * TILE_KEYS]
        self.replace(module, "queries", scratch, self._row)

    def _row(self, batch: ir.Value, head: ir.Value, row: ir.Value, scratch: list[ir.Value]) -> None:
        turned, sums, scores = scratch
        tile, sizes, vec = self.tile, self.sizes, self.tile.vec
        first, shared = arith.muli(row, index(TILE_QUERIES)), arith.divui(head, sizes["group"])
        k, v = self.rows("k", batch, shared, "keys", multiplied=True), self.rows("v", batch, shared, "keys")
        tile.turn(self.rows("q", batch, head, "queries", multiplied=True), first, turned, splat_of(vec, self.scale))
        tile.clear(sums)
        begin, end = self.listed(batch, head, row)
        pair = self.pair(batch, head)
        numbers = self.weight_numbers(pair, first, "queries") if self.dropout else []

        def chunk(start: ir.Value, before: Running) -> Running:
            count = arith.minui(arith.subi(end, start), index(self.chunk))
            now = self._score(start, count, k, turned, scores, before.largest)
            shrunk = before.shrunk(now)
            totals = [arith.mulf(t, s) for t, s in zip(before.totals, shrunk, strict=True)]
            totals = self._exponentials(start, count, scores, now, totals, numbers)

            def place_of(group: ir.Value, number: ir.Value) -> tuple[ir.Value, ir.Value]:
                return v.memory, v.at(arith.addi(self.first_key(arith.addi(start, group)), number))

            def partial(group: ir.Value) -> ir.Value:
                return self.partial(arith.addi(start, group))

            tile.add_weighted(sums, shrunk, WeightedRows(count, TILE_KEYS, scores, place_of, partial))
            return Running(now, totals)

        self._finish(pair, first, sums, along(begin, end, self.chunk, vec, tile.vectors, chunk))
        tile.turn_back(sums, self.rows("out", batch, head, "queries"), first)

    def _score(
        self, start: ir.Value, count: ir.Value, k: Rows, turned: ir.Value, scores: ir.Value, largest: list[ir.Value]
    ) -> list[ir.Value]:
        """Stores the scores of `count` tiles from `start` on. Returns the largest of them and `largest`."""
        tile = self.tile
        with loop(index(0), count, index(1), largest) as tiles:
            entry = self.entry(arith.addi(start, tiles.induction_variable))
            slot = arith.muli(tiles.induction_variable, index(TILE_KEYS))
            carried = list(tiles.inner_iter_args)
            choice = scf.IfOp(entry.partial, [tile.vec] * tile.vectors, has_else=True)
            for block, masked in ((choice.then_block, True), (choice.else_block, False)):
                with ir.InsertionPoint(block):
                    scf.YieldOp(self._tile_scores(entry, masked, slot, k, turned, scores, carried))
            scf.YieldOp(list(choice.results))
        return list(tiles.results)

    def _tile_scores(
        self,
        entry: Entry,
        masked: bool,
        slot: ir.Value,
        k: Rows,
        turned: ir.Value,
        scores: ir.Value,
        largest: list[ir.Value],
    ) -> list[ir.Value]:
        tile = self.tile
        seen = self.seen(entry.words) if masked else None
        with loop(index(0), index(TILE_KEYS), index(tile.at_once), largest) as keys:
            j, found = keys.induction_variable, list(keys.inner_iter_args)
            rows = [arith.addi(arith.addi(entry.key, j), index(n)) for n in range(tile.at_once)]
            for n, products in enumerate(self.products(k, rows, turned)):
                number = arith.addi(j, index(n))
                products, _ = self.scored(products, arith.addi(entry.floats, number))
                if seen is not None:
                    products = self.hidden(products, seen, number, float("-inf"))
                tile.store(products, scores, arith.addi(slot, number))
                found = [larger(score, before) for score, before in zip(products, found, strict=True)]
            scf.YieldOp(found)
        return list(keys.results)

    def _exponentials(
        self,
        start: ir.Value,
        count: ir.Value,
        scores: ir.Value,
        largest: list[ir.Value],
        totals: list[ir.Value],
        numbers: list[ir.Value],
    ) -> list[ir.Value]:
        """Replaces the scores of `count` tiles from `start` on by exp(score - largest), with dropout of weights of `numbers`.

        Returns `totals` plus the exponentials before dropout.
        """
        tile = self.tile
        with loop(index(0), arith.muli(count, index(TILE_KEYS)), index(1), totals) as keys:
            slot = keys.induction_variable
            powers = [power(score, top) for score, top in zip(tile.load(scores, slot), largest, strict=True)]
            kept = powers
            if numbers:
                group, number = arith.divui(slot, index(TILE_KEYS)), arith.remui(slot, index(TILE_KEYS))
                key = arith.addi(self.first_key(arith.addi(start, group)), number)
                kept = [arith.mulf(p, factor) for p, factor in zip(powers, self.kept(numbers, key), strict=True)]
            tile.store(kept, scores, slot)
            scf.YieldOp([arith.addf(t, p) for t, p in zip(keys.inner_iter_args, powers, strict=True)])
        return list(keys.results)

    def _finish(self, pair: ir.Value, first: ir.Value, sums: ir.Value, ends: Running) -> None:
        """Computes sums / totals, and stores the statistics."""
        tile, queries = self.tile, self.sizes["queries"]
        none, one = zeros(tile.vec), splat_of(tile.vec, 1.0)
        some = [arith.cmpf(arith.CmpFPredicate.UNE, total, none) for total in ends.totals]
        divisors = [arith.select(s, t, one) for s, t in zip(some, ends.totals, strict=True)]
        tile.scale(sums, [arith.divf(one, d) for d in divisors])
        base = arith.addi(arith.muli(pair, queries), first)
        left = arith.subi(queries, first)
        for v in range(tile.vectors):
            top, total = ends.largest[v], math.log(divisors[v])
            if ADD in self.steps:  # a huge negative number would absorb the total
                low = arith.cmpf(arith.CmpFPredicate.OLT, top, splat_of(tile.vec, LOW))
                top = arith.select(low, none, top)
            value = arith.select(some[v], arith.addf(top, total), none)
            behind = index(v * tile.lanes)
            mask = mask_of(tile.lanes, arith.subi(arith.maxui(left, behind), behind))
            vector.maskedstore(self.statistics, [arith.addi(base, behind)], mask, value)
