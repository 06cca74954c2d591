"""lower-sort-bags: lowers a `kernel.sort_bags` to a radix sort of the entries of every table by their rows.

before   %numbers, %starts, %bags, ... = "kernel.sort_bags"(%lines) {...}
after    scf.parallel (%part) = ...                     // parts take tables in turn
           words[p] = row << 32 | bag, for each entry   // with scales: | entry, whose bag and scale are stored aside
           for each 11 bits that rows have              // least significant digits first (Seward, 1954)
             count the digits, add up, write each word to its place
           read numbers, starts and bags from the sorted words

Entries of the padding index are left out. No hash is computed, and no memory as long as the table is read. Runs on functions
whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf

from gossamer.dialects.bags import Field
from gossamer.passes.bags.bag_ends import Bags
from gossamer.passes.bags.table_lines import Line, below, cast, only_if, signed_index, word
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import index, load_index, loop, parallel, reserve_workspace

_BITS = 11  # bits of a digit: its counts stay in the first-level cache
_DIGITS = 1 << _BITS
_ROW = 32  # the lowest bit of the row in a word


@dataclass(frozen=True)
class LowerSortBags:
    """Lower every kernel.sort_bags."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sort_bags"):
            with op.location:
                _Sort(module, op.opview).lower()


class _Sort:
    def __init__(self, module: ir.Module, op: Any) -> None:
        self.module, self.op, self.storage = module, op, storage_of(op.operation)
        self.lines = buffer_of(op.lines)
        self.numbers, self.starts, self.bags, self.scales, self.counts, self.wrong, self.words, *own = self.storage.outputs
        self.own_bags, self.own_scales = own
        self.wide = ir.MemRefType(self.scales.type).element_type
        self.scaled = ir.IntegerAttr(op.scaled).value == 1
        weights, integers = (ir.StringAttr(each).value for each in (op.weights, op.integers))
        self.weights = None if weights == "none" else ir.Type.parse(weights)
        self.integers = ir.Type.parse(integers)

    def lower(self) -> None:
        """Replaces the op by loops."""
        reserve_workspace(self.module, _DIGITS * 8)
        with ir.InsertionPoint(self.op):
            tables = memref.dim(self.lines, index(0))
            parts = arith.maxui(arith.minui(tables, self.storage.threads), index(1))
            with parallel(parts) as part:
                place = arith.muli(part, index(_DIGITS * 8))
                self.digits = memref.view(
                    ir.MemRefType.get([_DIGITS], ir.IntegerType.get_signless(64)), self.storage.workspace, place, []
                )
                with loop(part, tables, parts) as each:
                    self._table(Line(self.lines, each.induction_variable))
        self.storage.erase()

    def _table(self, line: Line) -> None:
        first, entries = line.number(Field.FIRST), line.number(Field.ENTRIES)
        memref.store(word(index(0)), self.wrong, [line.table])
        base = arith.muli(first, index(2))
        count = self._write_words(line, first, base)
        sides = [base, arith.addi(base, entries)]
        highest = arith.subi(line.number(Field.ROWS), index(1))
        width = arith.subi(word(index(64)), math.ctlz(arith.ori(word(highest), word(index(1)))))
        passes = arith.ceildivui(arith.index_cast(ir.IndexType.get(), width), index(_BITS))
        with loop(index(0), passes, index(1), sides) as each:
            source, target = each.inner_iter_args
            shift = arith.addi(arith.muli(each.induction_variable, index(_BITS)), index(_ROW))
            self._by_digit(count, source, target, word(shift))
            scf.YieldOp([target, source])
        self._different_rows(line, first, each.results[0], count)

    def _write_words(self, line: Line, first: ir.Value, base: ir.Value) -> ir.Value:
        """Writes a word for each entry that counts. Returns their number."""
        bags = Bags(line, self.integers, self.wrong)
        indices, rows = bags.indices, line.number(Field.ROWS)
        padding = line.number(Field.PADDING)
        weights = None if self.weights is None else line.memory(Field.WEIGHTS, self.weights, bags.entries)
        with loop(index(0), bags.count, index(1), [index(0)]) as each:
            bag, before = each.induction_variable, each.inner_iter_args[0]
            begin, end = bags.ends(bag)
            with loop(begin, end, index(1), [before]) as entries:
                entry, count = entries.induction_variable, entries.inner_iter_args[0]
                row = signed_index(indices, entry)
                known = below(row, rows)
                with only_if(arith.cmpi(arith.CmpIPredicate.uge, row, rows)):
                    bags.report(arith.addi(entry, index(1)))
                counts = arith.andi(known, arith.cmpi(arith.CmpIPredicate.ne, row, padding))
                with only_if(counts):
                    low = bag
                    if self.scaled:
                        low, own = entry, arith.addi(first, entry)
                        _store(bag, self.own_bags, own)
                        if weights is not None:
                            memref.store(cast(memref.load(weights, [entry]), self.wide), self.own_scales, [own])
                    made = arith.ori(arith.shli(row, index(_ROW)), low)
                    memref.store(word(made), self.words, [arith.addi(base, count)])
                scf.YieldOp([arith.addi(count, arith.index_castui(ir.IndexType.get(), counts))])
            if self.scaled and weights is None:
                self._share_evenly(arith.addi(first, begin), arith.addi(first, end), arith.subi(entries.results[0], before))
            scf.YieldOp([entries.results[0]])
        return each.results[0]

    def _share_evenly(self, begin: ir.Value, end: ir.Value, count: ir.Value) -> None:
        """Sets the scale of each entry of a bag to 1 / the number of entries that count."""
        one = arith.constant(self.wide, 1.0)
        share = arith.divf(one, arith.uitofp(self.wide, word(arith.maxui(count, index(1)))))
        with loop(begin, end, index(1)) as each:
            memref.store(share, self.own_scales, [each.induction_variable])

    def _by_digit(self, count: ir.Value, source: ir.Value, target: ir.Value, shift: ir.Value) -> None:
        """Sorts the words from one side to the other by a digit. The sort is stable."""
        with loop(index(0), index(_DIGITS), index(1)) as each:
            memref.store(word(index(0)), self.digits, [each.induction_variable])
        with loop(index(0), count, index(1)) as each:
            _, digit = self._word_at(source, each.induction_variable, shift)
            _store(arith.addi(load_index(self.digits, digit), index(1)), self.digits, digit)
        with loop(index(0), index(_DIGITS), index(1), [index(0)]) as each:
            digit, below_ = each.induction_variable, each.inner_iter_args[0]
            end = arith.addi(below_, load_index(self.digits, digit))
            _store(below_, self.digits, digit)
            scf.YieldOp([end])
        with loop(index(0), count, index(1)) as each:
            value, digit = self._word_at(source, each.induction_variable, shift)
            place = load_index(self.digits, digit)
            _store(arith.addi(place, index(1)), self.digits, digit)
            memref.store(value, self.words, [arith.addi(target, place)])

    def _word_at(self, side: ir.Value, number: ir.Value, shift: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns a word and its digit."""
        value = memref.load(self.words, [arith.addi(side, number)])
        digit = arith.andi(arith.shrui(value, shift), word(index(_DIGITS - 1)))
        return value, arith.index_castui(ir.IndexType.get(), digit)

    def _different_rows(self, line: Line, first: ir.Value, side: ir.Value, count: ir.Value) -> None:
        starts = arith.addi(first, line.table)
        with loop(index(0), count, index(1), [index(0), index(-1)]) as each:
            number, (found, previous) = each.induction_variable, each.inner_iter_args
            value = load_index(self.words, arith.addi(side, number))
            row, low = arith.shrui(value, index(_ROW)), arith.andi(value, index((1 << _ROW) - 1))
            place = arith.addi(first, number)
            if self.scaled:
                own = arith.addi(first, low)
                low = load_index(self.own_bags, own)
                memref.store(memref.load(self.own_scales, [own]), self.scales, [place])
            _store(low, self.bags, place)
            new = arith.cmpi(arith.CmpIPredicate.ne, row, previous)
            with only_if(new):
                _store(row, self.numbers, arith.addi(first, found))
                _store(number, self.starts, arith.addi(starts, found))
            scf.YieldOp([arith.addi(found, arith.index_castui(ir.IndexType.get(), new)), row])
        _store(count, self.starts, arith.addi(starts, each.results[0]))
        _store(each.results[0], self.counts, line.table)


def _store(value: ir.Value, buffer: ir.Value, at: ir.Value) -> None:
    memref.store(arith.index_castui(ir.MemRefType(buffer.type).element_type, value), buffer, [at])
