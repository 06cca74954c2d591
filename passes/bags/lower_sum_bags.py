"""lower-sum-bags: lowers a `kernel.sum_bags` to a loop over the bags of every table, with a bag's sums in registers.

before   %wrong = "kernel.sum_bags"(%lines) {kind = "sum", element = "f32", columns = 64, ...} : (tensor<?x?xi64>) -> ...
after    scf.parallel (%part) = ...                       // an equal share of the bags of every table
           for each table
             prefetch the rows of the part's first 48 entries
             for each bag, for each 8 vectors of columns
               for each entry
                 prefetch the row of the entry 48 further on
                 sums += table[index]                     // unless the index is the padding, or is reported as wrong
               the sums into out

Only the indices say which row is read next, so a processor's prefetchers cannot know it. With tables of 100,000 rows,
prefetches make the kernel 2.5 times as fast (Zen 5). Small tables, which stay near the core, do without them.

Rows go to the first-level cache if data that is read once arrives fastest past the second level (`streams`). Otherwise they go
to the second level, which has more places for pending lines. On Emerald Rapids, rows of 256 bytes arrive 1.4 times as fast in
the second level as in the first, and as fast as memory that is read in order.

Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.bags import Field
from gossamer.passes.bags.bag_ends import Bags
from gossamer.passes.bags.row_elements import RowElements
from gossamer.passes.bags.table_lines import Line, Piece, below, cast, chosen, only_if, signed_index, tiles_of, word
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import index, loop, narrowed, parallel, vector_of, zeros

_NEAR = 1 << 19  # most bytes of a table that stays near the core: half of a second-level cache
_UNDER_WAY = 256  # number of cache lines to prefetch ahead


@dataclass(frozen=True)
class LowerSumBags:
    """`bits` is the width of the target's vectors. `streams` says whether data that is read once arrives fastest when it
    bypasses the second-level cache."""

    bits: int = 512
    streams: bool = False

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sum_bags"):
            with op.location:
                _Sum(op.opview, self.bits, 1 if self.streams else 2).lower()


class _Sum:
    """Lowers one op. Rows are prefetched into the cache of this level."""

    def __init__(self, op: Any, bits: int, level: int) -> None:
        self.storage = storage_of(op.operation)
        self.op, self.lines, self.wrong = op, buffer_of(op.lines), self.storage.output
        self.kind, integers, weights = (ir.StringAttr(each).value for each in (op.kind, op.integers, op.weights))
        columns, wide = (ir.IntegerAttr(each).value for each in (op.columns, op.wide))
        self.rows = RowElements.of(ir.StringAttr(op.element).value, columns, bits, wide == 1, level)
        self.integers = ir.Type.parse(integers)
        self.weights = None if weights == "none" else ir.Type.parse(weights)
        self.ahead = max(8, min(64, _UNDER_WAY // self.rows.cache_lines))

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            tables = memref.dim(self.lines, index(0))
            with loop(index(0), tables, index(1), [index(0)]) as each:
                entries = Line(self.lines, each.induction_variable).number(Field.ENTRIES)
                memref.store(word(index(0)), self.wrong, [each.induction_variable])
                scf.YieldOp([arith.addi(each.inner_iter_args[0], entries)])
            parts = parts_of(each.results[0], index(self.rows.vectors), self.storage.threads)
            with parallel(parts) as part, loop(index(0), tables, index(1)) as each:
                self._table(Line(self.lines, each.induction_variable), part, parts)
        self.storage.erase()

    def _table(self, line: Line, part: ir.Value, parts: ir.Value) -> None:
        """Computes the part's bags of a table."""
        bags = Bags(line, self.integers, self.wrong)
        low, high = ends_of(bags.count, part, parts)
        size = arith.muli(line.number(Field.ROWS), index(self.rows.row_bytes))
        with chosen(arith.cmpi(arith.CmpIPredicate.ugt, size, index(_NEAR))) as (_, far, near):
            for block, fetches in ((far, True), (near, False)):
                with ir.InsertionPoint(block):
                    table = _Table(self, bags, fetches)
                    if fetches:
                        with only_if(arith.cmpi(arith.CmpIPredicate.ult, low, high)):
                            table.fetch_first(bags.begin(low))
                    with loop(low, high, index(1)) as each:
                        table.bag(each.induction_variable)
                    scf.YieldOp([])


class _Table:
    """One table. `fetches` says whether to prefetch rows."""

    def __init__(self, op: _Sum, bags: Bags, fetches: bool) -> None:
        self.op, self.bags, self.fetches, line = op, bags, fetches, bags.line
        self.line, self.count = line, line.number(Field.ROWS)
        self.memory, self.scales = op.rows.memory(line, self.count), op.rows.scales(line, self.count)
        self.indices, self.padding = bags.indices, line.number(Field.PADDING)
        self.last = arith.subi(bags.entries, index(1))
        self.weights = None if op.weights is None else line.memory(Field.WEIGHTS, op.weights, bags.entries)

    def fetch_first(self, begin: ir.Value) -> None:
        """Prefetches the rows of the first entries of the part."""
        until = arith.minui(arith.addi(begin, index(self.op.ahead)), self.bags.entries)
        with loop(begin, arith.maxui(begin, until), index(1)) as each:
            self.op.rows.fetch(self.memory, signed_index(self.indices, each.induction_variable), 0, self.op.rows.stored)

    def bag(self, bag: ir.Value) -> None:
        """Computes the result of a bag."""
        begin, end = self.bags.ends(bag)
        for tile in tiles_of(self.op.rows.stored, self.op.rows.lanes):
            if self.op.kind == "max":
                self._maxima(bag, begin, end, tile)
            else:
                self._sums(bag, begin, end, tile)

    def _sums(self, bag: ir.Value, begin: ir.Value, end: ir.Value, tile: list[Piece]) -> None:
        rows = self.op.rows
        results = rows.results(tile)
        start = [zeros(rows.wide)] * len(results)
        with loop(begin, end, index(1), [*start, index(0)]) as entries:
            *sums, count = entries.inner_iter_args

            def add(entry: ir.Value, row: ir.Value) -> list[ir.Value]:
                factor = self._factor(entry, row)
                values = rows.read(self.memory, row, tile)
                if factor is None:
                    added = [arith.addf(total, value) for total, value in zip(sums, values, strict=True)]
                else:
                    spread = vector.broadcast(rows.wide, factor)
                    added = [vector.fma(spread, value, total) for total, value in zip(sums, values, strict=True)]
                return [*added, arith.addi(count, index(1))]

            scf.YieldOp(self._entry(entries, tile, add))
        *sums, count = entries.results
        if self.op.kind == "mean":
            number = arith.uitofp(rows.wide.element_type, word(arith.maxui(count, index(1))))
            sums = [arith.divf(each, vector.broadcast(rows.wide, number)) for each in sums]
        self._store(bag, [narrowed(each, rows.narrow) for each in sums], results)

    def _maxima(self, bag: ir.Value, begin: ir.Value, end: ir.Value, tile: list[Piece]) -> None:
        rows = self.op.rows
        results, numbers = rows.results(tile), vector_of(rows.lanes, ir.IntegerType.get_signless(32))
        none = vector.broadcast(numbers, arith.constant(numbers.element_type, -1))
        carried = [*[zeros(rows.wide)] * len(results), *[none] * len(results), index(0)]
        with loop(begin, end, index(1), carried) as entries:
            *before, count = entries.inner_iter_args

            def add(entry: ir.Value, row: ir.Value) -> list[ir.Value]:
                values = rows.read(self.memory, row, tile)
                if (factor := self._factor(entry, row)) is not None:
                    values = [arith.mulf(each, vector.broadcast(rows.wide, factor)) for each in values]
                first = arith.cmpi(arith.CmpIPredicate.eq, count, index(0))
                always = vector.broadcast(vector_of(rows.lanes, first.type), first)
                number = vector.broadcast(numbers, arith.index_cast(numbers.element_type, row))
                more = [
                    arith.ori(always, arith.cmpf(arith.CmpFPredicate.OGT, value, old))
                    for value, old in zip(values, before, strict=False)
                ]
                found = [*values, *[number] * len(values)]
                return [
                    *(arith.select(better, new, old) for better, new, old in zip(more * 2, found, before, strict=True)),
                    arith.addi(count, index(1)),
                ]

            scf.YieldOp(self._entry(entries, tile, add))
        made = entries.results[: len(results)]
        self._store(bag, [narrowed(each, rows.narrow) for each in made], results)
        with only_if(self.line.there(Field.PLACES)):
            places = self.line.memory(Field.PLACES, numbers.element_type, self.bags.count, rows.columns)
            for value, piece in zip(entries.results[len(results) : -1], results, strict=True):
                piece.store(value, places, bag)

    def _entry(self, entries: scf.ForOp, tile: list[Piece], add: Any) -> Sequence[ir.Value]:
        """Returns the carried values after an entry. `add` computes them unless the entry is ignored."""
        entry, before = entries.induction_variable, list(entries.inner_iter_args)
        if self.fetches:
            later = signed_index(self.indices, arith.minui(arith.addi(entry, index(self.op.ahead)), self.last))
            self.op.rows.fetch(self.memory, later, tile[0].at, tile[-1].at + tile[-1].count)
        row = signed_index(self.indices, entry)
        known = below(row, self.count)
        counts = arith.andi(known, arith.cmpi(arith.CmpIPredicate.ne, row, self.padding))
        with chosen(counts, [value.type for value in before]) as (choice, taken, left_out):
            with ir.InsertionPoint(taken):
                scf.YieldOp(add(entry, row))
            with ir.InsertionPoint(left_out):
                with only_if(arith.cmpi(arith.CmpIPredicate.uge, row, self.count)):
                    self.bags.report(arith.addi(entry, index(1)))
                scf.YieldOp(before)
        return list(choice.results)

    def _factor(self, entry: ir.Value, row: ir.Value) -> ir.Value | None:
        """Returns the factor of a row: a weight, the scale of the row, or both; None for neither."""
        wide = self.op.rows.wide.element_type
        factors = []
        if self.weights is not None:
            factors.append(cast(memref.load(self.weights, [entry]), wide))
        if self.scales is not None:
            factors.append(memref.load(self.scales, [row]))
        return arith.mulf(*factors) if len(factors) == 2 else factors[0] if factors else None

    def _store(self, bag: ir.Value, values: list[ir.Value], results: list[Piece]) -> None:
        line, rows = self.line, self.op.rows
        with chosen(line.there(Field.NUMBERS), [ir.IndexType.get()]) as (choice, elsewhere, own):
            with ir.InsertionPoint(elsewhere):
                numbers = line.memory(Field.NUMBERS, ir.IntegerType.get_signless(64), self.bags.count)
                scf.YieldOp([signed_index(numbers, bag)])
            with ir.InsertionPoint(own):
                scf.YieldOp([bag])
        out = line.memory(Field.OUT, rows.narrow.element_type, self.bags.count, rows.columns)
        for value, piece in zip(values, results, strict=True):
            piece.store(value, out, choice.results[0])
