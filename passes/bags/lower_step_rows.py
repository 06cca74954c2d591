"""lower-step-rows: lowers a `kernel.step_rows` to a loop over the rows that have a gradient, for every table.

before   %wrong = "kernel.step_rows"(%lines, %rates) {kind = "adagrad", columns = 64, ...}
after    scf.parallel (%part) = ...                       // an equal share of the rows of every table
           for each table, for each of the part's rows
             prefetch the parameter and the states of the row 16 further on
             s += g * g;  p -= a * g / (sqrt(s) + e)      // 8 vectors of columns at a time

A row of a parameter and of its states is read and written once. Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.dialects.bags import StepField
from gossamer.passes.bags.table_lines import Line, Piece, below, chosen, fetch_row, signed_index, tiles_of, word
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import byte_width, index, loop, narrowed, parallel, vector_of, zeros

_AHEAD = 16  # how many rows ahead to prefetch
_Rates = list[ir.Value]


@dataclass(frozen=True)
class LowerStepRows:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.step_rows"):
            with op.location:
                _Step(op.opview, self.bits).lower()


class _Step:
    def __init__(self, op: Any, bits: int) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        self.lines, self.rates, self.wrong = buffer_of(op.lines), buffer_of(op.rates), self.storage.output
        self.kind, element = (ir.StringAttr(each).value for each in (op.kind, op.element))
        self.element = ir.Type.parse(element)
        self.columns = ir.IntegerAttr(op.columns).value
        self.lanes = bits // 8 // byte_width(self.element)
        self.vec = vector_of(self.lanes, self.element)

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            tables = memref.dim(self.lines, index(0))
            with loop(index(0), tables, index(1), [index(0)]) as each:
                memref.store(word(index(0)), self.wrong, [each.induction_variable])
                count = Line(self.lines, each.induction_variable).number(StepField.COUNT)
                scf.YieldOp([arith.addi(each.inner_iter_args[0], count)])
            work = index(4 * -(-self.columns // self.lanes))
            parts = parts_of(each.results[0], work, self.storage.threads)
            with parallel(parts) as part, loop(index(0), tables, index(1)) as each:
                self._table(Line(self.lines, each.induction_variable), part, parts)
        self.storage.erase()

    def _table(self, line: Line, part: ir.Value, parts: ir.Value) -> None:
        """Steps the part's rows of a table."""
        rows, count = line.number(StepField.ROWS), line.number(StepField.COUNT)
        numbers = line.memory(StepField.NUMBERS, ir.IntegerType.get_signless(64), count)
        gradient = line.memory(StepField.GRADIENT, self.element, count, self.columns)
        parameter = line.memory(StepField.PARAMETER, self.element, rows, self.columns)
        by_row = self.kind == "row_adagrad"
        state = line.memory(StepField.STATE, self.element, rows, None if by_row else self.columns)
        squares = line.memory(StepField.SQUARES, self.element, rows, self.columns)
        wide = [parameter, state, squares][: {"adagrad": 2, "adam": 3}.get(self.kind, 1)]
        rates = [self._rate(line, number) for number in range(5)]
        last = arith.subi(count, index(1))
        with loop(*ends_of(count, part, parts), index(1)) as each:
            number = each.induction_variable
            later = signed_index(numbers, arith.minui(arith.addi(number, index(_AHEAD)), last))
            for memory in wide:
                fetch_row(memory, later, 0, self.columns, 1)
            row = signed_index(numbers, number)
            with chosen(below(row, rows)) as (_, known, unknown):
                with ir.InsertionPoint(unknown):
                    memref.store(word(arith.addi(number, index(1))), self.wrong, [line.table])
                    scf.YieldOp([])
                with ir.InsertionPoint(known):
                    own = self._by_row(gradient, number, state, row, rates) if by_row else rates
                    for tile in tiles_of(self.columns, self.lanes):
                        self._columns(tile, gradient, number, wide, row, own)
                    scf.YieldOp([])

    def _columns(
        self,
        tile: list[Piece],
        gradient: ir.Value,
        number: ir.Value,
        wide: list[ir.Value],
        row: ir.Value,
        rates: list[ir.Value],
    ) -> None:
        """Steps some columns of a row."""
        rate, epsilon, first, second, factor = (vector.broadcast(self.vec, each) for each in rates)
        for piece in tile:
            g = arith.mulf(piece.load(gradient, number, self.element), factor)
            p, *states = (piece.load(memory, row, self.element) for memory in wide)
            if self.kind in ("sgd", "row_adagrad"):
                moved = arith.mulf(rate, g)
            elif self.kind == "adagrad":
                states = [vector.fma(g, g, states[0])]
                moved = arith.divf(arith.mulf(rate, g), arith.addf(math.sqrt(states[0]), epsilon))
            else:
                mean = vector.fma(first, arith.subf(g, states[0]), states[0])
                square = vector.fma(second, arith.subf(arith.mulf(g, g), states[1]), states[1])
                states = [mean, square]
                moved = arith.divf(arith.mulf(rate, mean), arith.addf(math.sqrt(square), epsilon))
            for value, memory in zip([arith.subf(p, moved), *states], wide, strict=False):
                piece.store(value, memory, row)

    def _by_row(self, gradient: ir.Value, number: ir.Value, state: ir.Value, row: ir.Value, rates: list[ir.Value]) -> _Rates:
        """Adds the mean of the row's squares to its state. Returns the rates of the row."""
        total, factor = zeros(self.vec), vector.broadcast(self.vec, rates[4])
        for tile in tiles_of(self.columns, self.lanes):
            for piece in tile:
                g = arith.mulf(piece.load(gradient, number, self.element), factor)
                total = vector.fma(g, g, total)
        order = ir.Attribute.parse("#arith.fastmath<reassoc>")
        summed = vector.reduction(self.element, ir.Attribute.parse("#vector.kind<add>"), total, fastmath=order)
        mean = arith.divf(summed, arith.constant(self.element, float(self.columns)))
        added = arith.addf(memref.load(state, [row]), mean)
        memref.store(added, state, [row])
        return [arith.divf(rates[0], arith.addf(math.sqrt(added), rates[1])), *rates[1:]]

    def _rate(self, line: Line, number: int) -> ir.Value:
        return narrowed(memref.load(self.rates, [line.table, index(number)]), self.element)
