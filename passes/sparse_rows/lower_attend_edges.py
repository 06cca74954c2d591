"""lower-attend-edges: lowers a `kernel.attend_edges` to one loop over rows, with scores in a scratch of a few kilobytes.

before   %y, %s = "kernel.attend_edges"(%a, %values, %target, %source) {heads = 8, ...}
after    scf.parallel (%part) = ...
           func.call @region_heads(...)
         func.func private @region_heads(...)
           for each row, for each block of up to 1024 scores:
             for each entry: scratch = score; largest = max(largest, score)          // one value a head
             for each vector of the scratch: scratch = exp(scratch - largest); total += scratch    // then dropout
             for each entry: sums += values[column] * scratch                        // vectors of features
           sums / total into y; largest, 1 / total into s

Only a row with several blocks keeps partial sums in y. They are scaled when `largest` grows (online_softmax.py). Runs on
functions whose storage is exposed with the arrays of open operands (expose-storage{arrays=true}).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.codegen.online_softmax import Running, along, larger, power
from gossamer.passes.loops.heads_in_lanes import gathered_sums, repeated
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, loop, splat_of, zeros
from gossamer.passes.sparse_rows.edge_loops import VECTORS, EdgeRows, Rows

_SCORES = 1024  # most scores of a block: with the operands of their entries, they stay in the first-level cache


@dataclass(frozen=True)
class LowerAttendEdges:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.attend_edges"):
            with op.location:
                _Forward(op.opview, self.bits).replace()


@dataclass(frozen=True)
class _Block:
    """The entries [first, stop) of a row that begins at `begin`."""

    begin: ir.Value
    first: ir.Value
    stop: ir.Value


class _Forward(EdgeRows):
    def __init__(self, op: Any, bits: int) -> None:
        super().__init__(op, bits, "target")
        self.entries = _SCORES // self.width  # most entries of a block

    def replace(self) -> None:
        self.lower(_SCORES + self.lanes, self._rows)

    def _rows(self, rows: Rows) -> None:
        type_ = ir.MemRefType.get([_SCORES + self.lanes], self.element)
        scratch = memref.view(type_, rows.workspace, rows.offset, [])
        with loop(rows.low, rows.high, index(1)) as each:
            self._row(rows, scratch, each.induction_variable)

    def _row(self, rows: Rows, scratch: ir.Value, row: ir.Value) -> None:
        begin, end = self.bounds(rows, row)
        own = self.read_row(rows, row)

        def block(first: ir.Value, before: Running) -> Running:
            stop = arith.minui(arith.addi(first, index(self.entries)), end)
            now = self._scores(rows, scratch, row, own, first, stop, before.largest[0])
            (shrunk,) = before.shrunk([now])
            filled = arith.muli(arith.subi(stop, first), index(self.width))
            sums = self._exponentials(rows, scratch, first, filled, now)
            total = vector.fma(before.totals[0], shrunk, sums)
            inverse = arith.divf(splat_of(self.short, 1.0), total)
            last = arith.cmpi(arith.CmpIPredicate.eq, stop, end)
            factor = arith.select(last, inverse, splat_of(self.short, 1.0))
            self._weighted_sums(rows, scratch, row, _Block(begin, first, stop), shrunk, factor)
            return Running([now], [total])

        ends = along(begin, end, self.entries, self.short, 1, block)
        out, statistics = rows.outputs
        self.store_heads(ends.largest[0], statistics, row, rows.first_head)
        inverse = arith.divf(splat_of(self.short, 1.0), ends.totals[0])
        self.store_heads(inverse, statistics, row, arith.addi(rows.first_head, index(self.heads)))
        empty = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, begin, end))
        with ir.InsertionPoint(empty.then_block):
            for place in self.places(rows.first_head, self.features):
                self.store_vector(zeros(self.vec), out, row, *place)
            scf.YieldOp([])

    def _scores(
        self,
        rows: Rows,
        scratch: ir.Value,
        row: ir.Value,
        own: dict[str, Any],
        first: ir.Value,
        stop: ir.Value,
        start: ir.Value,
    ) -> ir.Value:
        """Stores the scores of the entries [first, stop) in the scratch. Returns the largest of them and `start`."""
        with loop(first, stop, index(1), [start]) as entries:
            place, largest = entries.induction_variable, entries.inner_iter_args[0]
            self.prefetch(rows, place)
            score = self.activated(self.score(rows, self.entry(rows, place, row, own)).raw)
            vector.store(score, scratch, [self._at(place, first)])
            scf.YieldOp([larger(score, largest)])
        return entries.results[0]

    def _exponentials(self, rows: Rows, scratch: ir.Value, first: ir.Value, filled: ir.Value, largest: ir.Value) -> ir.Value:
        """Replaces the scores in the scratch, from entry `first` on, by exp(score - largest) with dropout. Returns their sums
        without dropout."""
        vector.store(splat_of(self.vec, float("-inf")), scratch, [filled])
        subtracted = repeated(largest, self.lanes)
        with loop(index(0), filled, index(self.lanes), [zeros(self.vec)]) as vectors:
            at = [vectors.induction_variable]
            weight = kept = power(vector.load(self.vec, scratch, at), subtracted)
            if self.dropout:
                number = arith.addi(first, arith.divui(vectors.induction_variable, index(self.width)))
                kept = arith.mulf(weight, self.kept(rows, number, self.lanes))
            vector.store(kept, scratch, at)
            scf.YieldOp([arith.addf(vectors.inner_iter_args[0], weight)])
        return gathered_sums(vectors.results[0], self.width)

    def _weighted_sums(
        self, rows: Rows, scratch: ir.Value, row: ir.Value, block: _Block, shrunk: ir.Value, factor: ir.Value
    ) -> None:
        """Stores (y * shrunk + the sum of values times scratch) * factor into y. The first block of a row takes y as 0."""
        first, stop = block.first, block.stop
        out = rows.outputs[0]
        places = self.places(rows.first_head, self.features)
        shrunken, factors = self.spread(shrunk, self.features), self.spread(factor, self.features)
        for low in range(0, len(places), VECTORS):
            tile = slice(low, low + VECTORS)
            again = scf.IfOp(
                arith.cmpi(arith.CmpIPredicate.ne, first, block.begin), [self.vec] * len(places[tile]), has_else=True
            )
            with ir.InsertionPoint(again.then_block):
                before = [self.load_vector(out, row, *place) for place in places[tile]]
                scf.YieldOp([arith.mulf(b, s) for b, s in zip(before, shrunken[tile], strict=True)])
            with ir.InsertionPoint(again.else_block):
                scf.YieldOp([zeros(self.vec)] * len(places[tile]))
            sums = self._sums(rows, scratch, first, stop, list(again.results), tile)
            for total, f, place in zip(sums, factors[tile], places[tile], strict=True):
                self.store_vector(arith.mulf(total, f), out, row, *place)

    def _sums(
        self, rows: Rows, scratch: ir.Value, first: ir.Value, stop: ir.Value, start: Sequence[ir.Value], tile: slice
    ) -> list[ir.Value]:
        with loop(first, stop, index(1), start) as entries:
            place = entries.induction_variable
            weights = self.spread(vector.load(self.short, scratch, [self._at(place, first)]), self.features)[tile]
            column = self.entry(rows, place, place, {}).column
            places = self.places(rows.first_head, self.features)[tile]
            read = [self.load_vector(rows.memory["values"], column, *p) for p in places]
            scf.YieldOp([vector.fma(w, r, s) for w, r, s in zip(weights, read, entries.inner_iter_args, strict=True)])
        return list(entries.results)

    def _at(self, place: ir.Value, first: ir.Value) -> ir.Value:
        """Returns the place in the scratch where the scores of an entry begin."""
        return arith.muli(arith.subi(place, first), index(self.width))
