"""lower-attend-blocks: a `kernel.attend_blocks` becomes one loop over tiles of queries, which walks the tiles of its keys.

before   %y, %s = "kernel.attend_blocks"(%q, %k, %v, %positions, %tiles, %words, ...) {head_size = 64, scale = 0.125}
after    scf.parallel (%task) = ...                           // batch x heads x tiles of 32 queries
           turned[d][query] = q[query][d] * scale
           for each few tiles of 16 keys that the table lists
             scores[key][query] = sum_d k[key][d] turned[d][query]     // hidden ones -inf, where the tile is hidden in part
             scores = exp(scores - largest), total
             sums[d][query] = sums * exp(largest before - largest) + sum_key v[key][d] scores[key][query]
           sums / total into y, largest + log(total) into s

Softmax goes along with the keys (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
"FlashAttention", 2022). Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.dialects.attention import SIZES, STRIDED, TILE_KEYS, TILE_QUERIES
from gossamer.passes.attention.query_tile import QueryTile, Rows
from gossamer.passes.finish.expand_math import exp_below_zero
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import (
    index,
    load_index,
    loop,
    lowest_of,
    mask_of,
    parallel,
    reserve_workspace,
    splat_of,
    vector_of,
    zeros,
)

_CHUNK = 16 << 10  # bytes of keys, or of values, between two updates of the sums: they stay in the first-level cache
_MOST = 8  # tiles in it


@dataclass(frozen=True)
class LowerAttendBlocks:
    """`bits` is the width of the target's vectors."""

    name: ClassVar[str] = "lower-attend-blocks"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.attend_blocks"):
            with op.location:
                _Attend(op.opview, self.bits).lower(module)


class _Attend:
    def __init__(self, op: Any, bits: int) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        self.size, self.scale = ir.IntegerAttr(op.head_size).value, ir.FloatAttr(op.scale).value
        self.tile = QueryTile(self.size, bits)
        self.chunk = max(1, min(_MOST, _CHUNK // (4 * self.size * TILE_KEYS)))
        self.positions, self.tiles, self.words = (buffer_of(v) for v in (op.positions, op.tiles, op.words))
        names = [*SIZES, *(f"{name}_{of}" for name in STRIDED for of in ("batch", "head", "row"))]
        self.sizes = dict(zip(names, op.sizes, strict=True))
        out, self.statistics = self.storage.outputs
        self.memory = {"q": buffer_of(op.q), "k": buffer_of(op.k), "v": buffer_of(op.v), "out": out}

    def lower(self, module: ir.Module) -> None:
        """Put loops in place of the op."""
        tile, sizes = self.tile, self.sizes
        scratch = [tile.padded, tile.padded, self.chunk * TILE_KEYS]
        space = 4 * TILE_QUERIES * sum(scratch)
        reserve_workspace(module, space)
        with ir.InsertionPoint(self.op):
            rows = arith.ceildivui(sizes["queries"], index(TILE_QUERIES))
            pairs = arith.muli(sizes["batch"], sizes["heads"])
            with parallel(arith.muli(pairs, rows)) as task:
                offset = arith.muli(thread_number(), index(space))
                turned, sums, scores = self._scratch(offset, scratch)
                pair, row = arith.divui(task, rows), arith.remui(task, rows)
                batch, head = arith.divui(pair, sizes["heads"]), arith.remui(pair, sizes["heads"])
                self._row(batch, head, pair, row, turned, sums, scores)
        self.storage.erase()

    def _scratch(self, offset: ir.Value, rows: list[int]) -> list[ir.Value]:
        found = []
        for count in rows:
            found.append(memref.view(self.tile.memory(count), self.storage.workspace, offset, []))
            offset = arith.addi(offset, index(4 * TILE_QUERIES * count))
        return found

    def _rows(self, name: str, batch: ir.Value, head: ir.Value, count: str) -> Rows:
        base = arith.addi(arith.muli(batch, self.sizes[f"{name}_batch"]), arith.muli(head, self.sizes[f"{name}_head"]))
        return Rows(self.memory[name], base, self.sizes[f"{name}_row"], self.sizes[count])

    def _row(
        self,
        batch: ir.Value,
        head: ir.Value,
        pair: ir.Value,
        row: ir.Value,
        turned: ir.Value,
        sums: ir.Value,
        scores: ir.Value,
    ) -> None:
        tile, sizes, vec = self.tile, self.sizes, self.tile.vec
        first, shared = arith.muli(row, index(TILE_QUERIES)), arith.divui(head, sizes["group"])
        k, v = self._rows("k", batch, shared, "keys"), self._rows("v", batch, shared, "keys")
        tile.turn(self._rows("q", batch, head, "queries"), first, turned, splat_of(vec, self.scale))
        with loop(index(0), index(tile.padded), index(1)) as ds:
            tile.store([zeros(vec)] * tile.vectors, sums, ds.induction_variable)
        at = arith.addi(
            arith.muli(row, sizes["table_row"]),
            arith.addi(arith.muli(batch, sizes["table_batch"]), arith.muli(head, sizes["table_head"])),
        )
        begin, end = load_index(self.positions, at), load_index(self.positions, arith.addi(at, index(1)))
        lowest = [splat_of(vec, lowest_of(vec.element_type))] * tile.vectors
        with loop(begin, end, index(self.chunk), [*lowest, *[zeros(vec)] * tile.vectors]) as chunks:
            start, carried = chunks.induction_variable, list(chunks.inner_iter_args)
            largest, totals = carried[: tile.vectors], carried[tile.vectors :]
            count = arith.minui(arith.subi(end, start), index(self.chunk))
            now = self._score(start, count, k, turned, scores, largest)
            shrunk = [exp_below_zero(arith.subf(a, b)) for a, b in zip(largest, now, strict=True)]
            totals = [arith.mulf(t, s) for t, s in zip(totals, shrunk, strict=True)]
            totals = self._exponentials(count, scores, now, totals)

            def place_of(group: ir.Value, number: ir.Value, start: ir.Value = start) -> tuple[ir.Value, ir.Value]:
                key, _, _ = self._entry(arith.addi(start, group))
                return v.memory, v.at(arith.addi(key, number))

            tile.add_weighted(sums, shrunk, count, scores, TILE_KEYS, place_of)
            scf.YieldOp([*now, *totals])
        ends = list(chunks.results)
        self._finish(pair, first, sums, ends[: tile.vectors], ends[tile.vectors :])
        tile.turn_back(sums, self._rows("out", batch, head, "queries"), first)

    def _entry(self, number: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """A tile of the table: its first key, whether it is hidden in part, where its words begin."""
        at = arith.muli(number, index(2))
        entry, words = load_index(self.tiles, at), load_index(self.tiles, arith.addi(at, index(1)))
        key = arith.muli(arith.shrui(entry, index(1)), index(TILE_KEYS))
        partial = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(entry, index(1)), index(0))
        return key, partial, arith.muli(words, index(TILE_QUERIES))

    def _score(
        self, start: ir.Value, count: ir.Value, k: Rows, turned: ir.Value, scores: ir.Value, largest: list[ir.Value]
    ) -> list[ir.Value]:
        """The scores of `count` tiles from `start` on, and the largest of them and `largest`."""
        tile = self.tile
        with loop(index(0), count, index(1), largest) as tiles:
            key, partial, words = self._entry(arith.addi(start, tiles.induction_variable))
            slot = arith.muli(tiles.induction_variable, index(TILE_KEYS))
            carried = list(tiles.inner_iter_args)
            choice = scf.IfOp(partial, [tile.vec] * tile.vectors, has_else=True)
            for block, masked in ((choice.then_block, True), (choice.else_block, False)):
                with ir.InsertionPoint(block):
                    scf.YieldOp(self._tile_scores(key, slot, words if masked else None, k, turned, scores, carried))
            scf.YieldOp(list(choice.results))
        return list(tiles.results)

    def _tile_scores(
        self,
        key: ir.Value,
        slot: ir.Value,
        words: ir.Value | None,
        k: Rows,
        turned: ir.Value,
        scores: ir.Value,
        largest: list[ir.Value],
    ) -> list[ir.Value]:
        tile = self.tile
        seen = self._seen(words) if words is not None else None
        with loop(index(0), index(TILE_KEYS), index(tile.at_once), largest) as keys:
            j, found = keys.induction_variable, list(keys.inner_iter_args)
            places = [k.at(arith.addi(arith.addi(key, j), index(n))) for n in range(tile.at_once)]
            for n, products in enumerate(tile.products(k.memory, places, turned)):
                number = arith.addi(j, index(n))
                if seen is not None:
                    products = self._hidden(products, seen, number)
                tile.store(products, scores, arith.addi(slot, number))
                for v, score in enumerate(products):
                    larger = arith.cmpf(arith.CmpFPredicate.OGT, score, found[v])
                    found[v] = arith.select(larger, score, found[v])
            scf.YieldOp(found)
        return list(keys.results)

    def _seen(self, words: ir.Value) -> list[ir.Value]:
        """The words of a tile, one a lane."""
        lanes, i32 = self.tile.lanes, ir.IntegerType.get_signless(32)
        narrow, wide = vector_of(lanes, ir.IntegerType.get_signless(16)), vector_of(lanes, i32)
        places = [arith.addi(words, index(v * lanes)) for v in range(self.tile.vectors)]
        return [arith.extui(wide, vector.load(narrow, self.words, [place])) for place in places]

    def _hidden(self, scores: list[ir.Value], seen: list[ir.Value], key: ir.Value) -> list[ir.Value]:
        """Minus infinity where a query does not see the key."""
        i32 = ir.IntegerType.get_signless(32)
        bit = arith.shli(arith.constant(i32, 1), arith.index_cast(i32, key))
        wide = ir.VectorType(seen[0].type)
        bits = vector.broadcast(wide, bit)
        none = arith.constant(wide, ir.DenseElementsAttr.get_splat(wide, ir.IntegerAttr.get(i32, 0)))
        never = splat_of(self.tile.vec, float("-inf"))
        visible = [arith.cmpi(arith.CmpIPredicate.ne, arith.andi(word, bits), none) for word in seen]
        return [arith.select(sees, score, never) for sees, score in zip(visible, scores, strict=True)]

    def _exponentials(
        self, count: ir.Value, scores: ir.Value, largest: list[ir.Value], totals: list[ir.Value]
    ) -> list[ir.Value]:
        """The scores of `count` tiles as exp(score - largest), and `totals` with them."""
        tile = self.tile
        with loop(index(0), arith.muli(count, index(TILE_KEYS)), index(1), totals) as keys:
            read = tile.load(scores, keys.induction_variable)
            powers = [exp_below_zero(arith.subf(score, top)) for score, top in zip(read, largest, strict=True)]
            tile.store(powers, scores, keys.induction_variable)
            scf.YieldOp([arith.addf(t, p) for t, p in zip(keys.inner_iter_args, powers, strict=True)])
        return list(keys.results)

    def _finish(self, pair: ir.Value, first: ir.Value, sums: ir.Value, largest: list[ir.Value], totals: list[ir.Value]) -> None:
        """sums / totals, and the statistics."""
        tile, queries = self.tile, self.sizes["queries"]
        none, one = zeros(tile.vec), splat_of(tile.vec, 1.0)
        some = [arith.cmpf(arith.CmpFPredicate.UNE, total, none) for total in totals]
        divisors = [arith.select(s, t, one) for s, t in zip(some, totals, strict=True)]
        inverse = [arith.divf(one, d) for d in divisors]
        with loop(index(0), index(self.size), index(1)) as ds:
            values = tile.load(sums, ds.induction_variable)
            tile.store([arith.mulf(a, b) for a, b in zip(values, inverse, strict=True)], sums, ds.induction_variable)
        base = arith.addi(arith.muli(pair, queries), first)
        left = arith.subi(queries, first)
        for v in range(tile.vectors):
            value = arith.select(some[v], arith.addf(largest[v], math.log(divisors[v])), none)
            behind = index(v * tile.lanes)
            mask = mask_of(tile.lanes, arith.subi(arith.maxui(left, behind), behind))
            vector.maskedstore(self.statistics, [arith.addi(base, behind)], mask, value)
