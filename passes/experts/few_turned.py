"""Products of all slots of an expert that has few with a turned weight, [experts, columns, rows].

func.private @region_few4(...)
  for each 4 columns of x                         // rows of memory
    for each vector of rows
      scf.for the sums of 4 slots in scratch memory: 16 multiply-adds; prefetch the next 4 rows of memory

The weight is read from memory once, in place, in pieces of some KB.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.experts.slot_tile import SlotTile
from gossamer.passes.loops.vectors import index, loop, mask_of, zeros

SLOTS = (8, 4, 2, 1)
"""Numbers of slots for which there are functions, the most first."""
_ROWS = 4  # rows of memory that are multiplied at once
_AHEAD = 8  # how many rows of memory ahead to prefetch


class FewTurned(SlotTile):
    """Emits `rows` rows of the products of all slots of a block, from a place (row of memory, `begin`) of the weight on."""

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        *others, self.row, self.begin, self.rows = given
        super().__init__(product, slots, *others)

    def emit(self) -> None:
        """Emits the body of a function."""
        whole = arith.subi(self.columns, arith.remui(self.columns, index(_ROWS)))
        for low, high, count in ((index(0), whole, _ROWS), (whole, self.columns, self.stored.pair)):
            with loop(low, high, index(count)) as columns:
                self._lines(columns.induction_variable, count)

    def _lines(self, column: ir.Value, count: int) -> None:
        """Adds the products of some columns of x with rows of memory."""
        step = self.lanes * self.stored.pair
        whole = arith.subi(self.rows, arith.remui(self.rows, index(step)))
        with loop(index(0), whole, index(step)) as parts:
            self._step(column, count, parts.induction_variable, None)
        with loop(whole, self.rows, index(step)) as rest:
            self._step(column, count, rest.induction_variable, arith.subi(self.rows, rest.induction_variable))

    def _step(self, column: ir.Value, count: int, at: ir.Value, left: ir.Value | None) -> None:
        pair, place = self.stored.pair, arith.addi(self.begin, at)
        rows = [arith.addi(self.row, arith.addi(column, index(n))) for n in range(count)]
        for row in rows if left is None else ():
            self.weight.fetch(arith.addi(row, index(_AHEAD)), place, self.streams)
        lines = [self.weight.read(row, place, left)[0] for row in rows]
        weights = [self.stored.paired(lines[n : n + pair]) for n in range(0, count, pair)]
        for t, token in enumerate(self.tokens):
            xs = [self.stored.spread(self.x, token, arith.addi(column, index(n))) for n in range(0, count, pair)]
            for v in range(pair):
                where = [index(t), arith.addi(at, index(v * self.lanes))]
                total = self._load(where, left, v)
                for own, x in zip(weights, xs, strict=True):
                    total = self.stored.multiplied([own[v]], [x], total)
                self._store(total, where, left, v)

    def _load(self, where: list[ir.Value], left: ir.Value | None, v: int) -> ir.Value:
        if left is None:
            return vector.load(self.stored.vec, self.sums, where)
        return vector.maskedload(self.stored.vec, self.sums, where, self._mask(left, v), zeros(self.stored.vec))

    def _store(self, total: ir.Value, where: list[ir.Value], left: ir.Value | None, v: int) -> None:
        if left is None:
            vector.store(total, self.sums, where)
        else:
            vector.maskedstore(self.sums, where, self._mask(left, v), total)

    def _mask(self, left: ir.Value, v: int) -> ir.Value:
        return mask_of(self.lanes, arith.subi(arith.maxui(left, index(v * self.lanes)), index(v * self.lanes)))
