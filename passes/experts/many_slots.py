"""Some of an expert's many slots: their sums with some rows of the weight are in registers.

func.private @region_many6(...)
  for each 4 rows
    scf.for each vector of columns iter_args(6 slots x 4 rows of sums)
      24 multiply-adds of 10 vectors
      two of the rows that come next are fetched into a second-level cache
    the totals, added to scratch memory

The rows that come next are fetched while all slots are computed, some rows with each pass over the slots, so that memory and
arithmetic units work at the same time.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf

from gossamer.passes.experts.slot_tile import SlotTile
from gossamer.passes.loops.vectors import index, loop, zeros

ROWS = 4
SLOTS = {512: 6, 256: 3, 128: 6}
"""By the bits of vectors: 32 registers, 16 with AVX2."""


def fetched(number: ir.Value, passes: ir.Value) -> list[ir.Value]:
    """Which two of the next 4 rows a pass over the slots fetches, by its number; more than 3 for none."""
    few = arith.cmpi(arith.CmpIPredicate.ult, passes, index(ROWS))
    first = arith.select(few, arith.muli(number, index(2)), number)
    return [first, arith.select(few, arith.addi(first, index(1)), first)]


class ManySlots(SlotTile):
    """Slots of a block, `count` of its rows from `begin` on and columns [low, high).

    ahead   the two rows of the next 4 that are fetched, and how many rows on those are
    """

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        super().__init__(product, slots, *given[:-7])
        self.begin, self.count, self.low, self.high, *self.ahead, self.distance = given[-7:]

    def emit(self) -> None:
        """The body of a function."""
        last = arith.subi(arith.addi(self.begin, self.count), index(1))
        with loop(index(0), self.count, index(ROWS)) as tiles:
            first = arith.addi(self.begin, tiles.induction_variable)
            rows = [self.row(arith.addi(first, index(r)), last) for r in range(ROWS)]
            self.add(self._sums(rows, [self._next(first, each) for each in self.ahead]), first, ROWS, rows)

    def _next(self, first: ir.Value, which: ir.Value) -> ir.Value:
        """A row to fetch; the first row, which is near already, for none."""
        there = arith.cmpi(arith.CmpIPredicate.ult, which, index(ROWS))
        row = arith.addi(first, arith.addi(self.distance, which))
        return arith.addi(self.place, arith.muli(arith.select(there, row, first), self.step))

    def _sums(self, rows: list[ir.Value], ahead: list[ir.Value]) -> list[ir.Value]:
        """A vector of sums for each slot and row, the rows of a slot one after the other."""
        one, line, begin = self.stored.columns, self.stored.columns * self.stored.line, self.low
        sums = [zeros(self.stored.vec)] * (self.slots * ROWS)
        for step in dict.fromkeys((line, one)):
            size = arith.subi(self.high, begin)
            whole = arith.addi(begin, arith.subi(size, arith.remui(size, index(step))))
            with loop(begin, whole, index(step), sums) as steps:
                found, column = list(steps.inner_iter_args), steps.induction_variable
                if step == line:
                    for row in ahead:
                        self.fetch(row, column, 2)
                for n in range(step // one):
                    found = self._step(rows, arith.addi(column, index(n * one)), found, None)
                scf.YieldOp(found)
            begin, sums = whole, list(steps.results)
        with loop(begin, self.high, index(one), sums) as rest:
            column = rest.induction_variable
            scf.YieldOp(self._step(rows, column, list(rest.inner_iter_args), arith.subi(self.high, column)))
        return list(rest.results)

    def _step(self, rows: list[ir.Value], column: ir.Value, sums: list[ir.Value], left: ir.Value | None) -> list[ir.Value]:
        found, xs = list(sums), self.tokens_at(column, left)
        for r, row in enumerate(rows):
            weights = self.weights(row, column, left)
            for t, x in enumerate(xs):
                found[t * ROWS + r] = self.stored.multiplied(weights, x, found[t * ROWS + r])
        return found
