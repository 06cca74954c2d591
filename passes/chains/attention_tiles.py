"""The body of a chain's attention stage on AMX. It multiplies the pairs of attention_pairs.py by tiles.

    scores   16 keys x 32 features, transposed from the lines of the keys, times the lines of the queries of 16 tokens
    y        16 features of the values x 32 keys, times the lines of the weights

Keys are padded to a multiple of 32 with weights of 0, and their values are not read. Keys later than some query of the tile are
not multiplied by tiles, because a weight of 0 would not hide a NaN there.
"""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.passes.chains.attention_pairs import AttentionInPairs
from gossamer.passes.codegen.online_softmax import inverse, lowest
from gossamer.passes.loops.vectors import index, loop, mask_of, transpose, vector_of, zeros
from gossamer.passes.weights_bf16.bf16_pairs import LINE

KEYS, FEATURES = 16, 32
"""Keys and features of an AMX tile of keys. The size of a head is a multiple of FEATURES."""


class AttentionInTiles(AttentionInPairs):
    """Attention by AMX tiles. `halves` is the workspace as bf16, for the keys and values."""

    def __init__(self, *arguments: Any, halves: ir.Value) -> None:
        super().__init__(*arguments)
        self.halves = halves
        self.factor, self.total = (ir.Type.parse(f"!x86.amx.tile<16x{row}>") for row in (f"{LINE}xbf16", "16xf32"))
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        self.words, dwords, element = vector_of(KEYS, i32), [KEYS, FEATURES // 2], ir.BF16Type.get()
        count = max(1, self.size // FEATURES)
        bytes_ = memref.alloca(ir.MemRefType.get([count * KEYS * FEATURES * 2], i8), [], [], alignment=64)
        at = [index(n * KEYS * FEATURES * 2) for n in range(count)]
        self.parts = [memref.view(ir.MemRefType.get(dwords, i32), bytes_, n, []) for n in at]
        self.tiles = [memref.view(ir.MemRefType.get([KEYS, FEATURES], element), bytes_, n, []) for n in at]
        width = self.frame.vectors * self.frame.lanes
        self.sums = memref.alloca(ir.MemRefType.get([KEYS, width], self.frame.vec.element_type), [], [], alignment=64)

    def _score(self, query: ir.Value, row: ir.Value) -> list[ir.Value]:
        frame = self.frame
        with self._tiles(lowest(frame.vec, frame.vectors)) as tiles:
            origin, taken, stride = self._tile(tiles.induction_variable)
            base = arith.addi(self.sequence.keys, self.sequence.place(tiles.induction_variable))
            with loop(index(0), taken, index(KEYS), list(tiles.inner_iter_args)) as blocks:
                j = blocks.induction_variable
                first = arith.addi(origin, j)
                self._multiply_keys(query, arith.addi(arith.addi(base, j), arith.muli(row, stride)), stride, first)
                with loop(index(0), index(KEYS), index(self.keys_at_once), list(blocks.inner_iter_args)) as several:
                    highest = list(several.inner_iter_args)
                    for a in range(self.keys_at_once):
                        key = arith.addi(first, arith.addi(several.induction_variable, index(a)))
                        raw = [vector.load(frame.vec, self.scores, [key, frame.at(v)]) for v in self.vectors]
                        highest = self._keep(raw, key, highest)
                    scf.YieldOp(highest)
                scf.YieldOp(list(several.results))
            scf.YieldOp(list(blocks.results))
        return list(tiles.results)

    def _multiply_keys(self, query: ir.Value, at: ir.Value, stride: ir.Value, key: ir.Value) -> None:
        """Computes the scores of 16 keys, whose lines begin at place `at`, into the rows from `key` on."""
        for n, part in enumerate(self.parts):
            lines = [arith.addi(at, arith.muli(stride, index(n * FEATURES // 2 + d))) for d in range(FEATURES // 2)]
            turned = transpose([vector.load(self.words, self.sequence.memory, [line]) for line in lines])
            for k, each in enumerate(turned):
                vector.store(each, part, [index(k), index(0)])
        sums = [x86.TileZeroOp(self.total).result for _ in self.vectors]
        for n, tile in enumerate(self.tiles):
            keys = x86.TileLoadOp(self.factor, tile, [index(0), index(0)]).result
            deep = arith.addi(query, index(n * FEATURES // 2))
            for v in self.vectors:
                queries = x86.TileLoadOp(self.factor, self.queries, [deep, index(v * LINE)]).result
                sums[v] = x86.TileMulFOp(keys, queries, sums[v]).result
        for v, total in enumerate(sums):
            x86.TileStoreOp(self.scores, [key, self.frame.at(v)], total)

    def _exponentiate(self, highest: list[ir.Value]) -> list[ir.Value]:
        totals = super()._exponentiate(highest)
        line = zeros(vector_of(LINE, ir.BF16Type.get()))
        first, last = (arith.ceildivui(self.keys, index(n)) for n in (self.together, FEATURES))
        with loop(first, arith.muli(last, index(FEATURES // self.together)), index(1)) as lines:
            for v in self.vectors:
                vector.store(line, self.weights, [lines.induction_variable, index(v * LINE)])
        return totals

    def _sum(self, result: ir.Value, row: ir.Value, totals: list[ir.Value]) -> None:
        frame, shares = self.frame, inverse(totals)
        count = arith.ceildivui(self.keys, index(self.sequence.tokens))
        seen = arith.divui(self.sequence.within, index(self.sequence.tokens)) if self.causal else count
        with loop(index(0), index(self.size), index(KEYS)) as blocks:
            first = arith.addi(row, blocks.induction_variable)
            nothing = [x86.TileZeroOp(self.total).result for _ in self.vectors]
            with loop(index(0), seen, index(1), nothing) as tiles:
                scf.YieldOp(self._multiply_values(tiles.induction_variable, first, list(tiles.inner_iter_args)))
            for v, total in enumerate(tiles.results):
                x86.TileStoreOp(self.sums, [index(0), frame.at(v)], total)
            with loop(index(0), index(KEYS), index(self.keys_at_once)) as several:
                features = [arith.addi(several.induction_variable, index(a)) for a in range(self.keys_at_once)]
                sums = [vector.load(frame.vec, self.sums, [n, frame.at(v)]) for n in features for v in self.vectors]
                if self.causal:
                    sums = self._later(seen, count, [arith.addi(first, n) for n in features], sums)
                place = arith.addi(result, blocks.induction_variable)
                for i, total in enumerate(sums):
                    a, v = divmod(i, frame.vectors)
                    row_of_y = arith.addi(place, features[a])
                    frame.store(arith.mulf(total, shares[v]), self.op.operation.results[0], row_of_y, v)

    def _multiply_values(self, number: ir.Value, row: ir.Value, carried: Sequence[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus 16 features of the weighted values of a tile of keys."""
        origin, taken, stride = self._tile(number)
        base = arith.addi(self.sequence.values, self.sequence.place(number))
        at = arith.addi(arith.muli(base, index(self.together)), arith.muli(row, stride))
        whole = arith.muli(arith.divui(taken, index(FEATURES)), index(FEATURES))

        def times(values: ir.Value, j: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
            line = arith.divui(arith.addi(origin, j), index(self.together))
            loaded = (x86.TileLoadOp(self.factor, self.weights, [line, index(v * LINE)]).result for v in self.vectors)
            return [x86.TileMulFOp(values, each, total).result for each, total in zip(loaded, sums, strict=True)]

        with loop(index(0), whole, index(FEATURES), list(carried)) as blocks:
            j = blocks.induction_variable
            values = x86.TileLoadOp(self.factor, self.halves, [arith.addi(at, j)], stride=stride).result
            scf.YieldOp(times(values, j, list(blocks.inner_iter_args)))
        with loop(whole, taken, index(FEATURES), list(blocks.results)) as last:  # at most once
            j = last.induction_variable
            self._copy_values(at, stride, j, arith.subi(taken, j))
            values = x86.TileLoadOp(self.factor, self.tiles[0], [index(0), index(0)]).result
            scf.YieldOp(times(values, j, list(last.inner_iter_args)))
        return list(last.results)

    def _copy_values(self, at: ir.Value, stride: ir.Value, key: ir.Value, left: ir.Value) -> None:
        """Copies 16 features of the last `left` values into a tile, with zeros behind them."""
        line, mask = vector_of(FEATURES, ir.BF16Type.get()), mask_of(FEATURES, left)
        for n in range(KEYS):
            place = arith.addi(arith.addi(at, arith.muli(stride, index(n))), key)
            vector.store(vector.maskedload(line, self.halves, [place], mask, zeros(line)), self.tiles[0], [index(n), index(0)])

    def _later(self, seen: ir.Value, count: ir.Value, rows: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the weighted values of those tiles of keys that some query must not see."""
        with loop(seen, count, index(1), sums) as tiles:
            origin, taken, stride = self._tile(tiles.induction_variable)
            base = arith.addi(self.sequence.values, self.sequence.place(tiles.induction_variable))
            places = [arith.addi(base, arith.muli(row, self._in_elements(stride))) for row in rows]
            scf.YieldOp(self._weighted(origin, taken, places, list(tiles.inner_iter_args), True))
        return list(tiles.results)
