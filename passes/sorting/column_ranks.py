"""Computes the rank of each column of a row: how many of its other columns are smaller.

for each 16 columns
  for each column of the row
    ranks += column < the 16 columns
  store the 16 columns, and behind them their ranks, in scratch memory

A row of n different columns takes n^2 / 16 steps, without branches that depend on the columns. So this is the fastest way to
sort short rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.loops.ask_for_memory import array_in
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, rolled, vector_of

_LANES = 16
_SHORT = 64  # rows with at most so many columns are always ranked
_STEPS = 256  # a longer row may have n columns if the matrix has at least n^2 times so many


class ColumnRanks:
    """Memory for the columns of a row, numbers of type `element`, and for their ranks. The matrix has `columns` columns."""

    def __init__(self, columns: ir.Value, element: ir.Type, memory: ir.Value, offset: ir.Value) -> None:
        self._element = element
        self._lines = array_in(memory, element, arith.muli(_places(columns), index(2)), offset)

    @staticmethod
    def size(columns: ir.Value, element: ir.Type) -> ir.Value:
        """Returns the bytes of this memory."""
        return arith.muli(_places(columns), index(2 * _bytes(element)))

    @staticmethod
    def pay(columns: ir.Value, count: ir.Value) -> ir.Value:
        """Whether a row of `count` columns is short enough (i1)."""
        short = arith.cmpi(arith.CmpIPredicate.ule, count, index(_SHORT))
        share = arith.divui(columns, index(_STEPS))
        return arith.ori(short, arith.cmpi(arith.CmpIPredicate.ule, arith.muli(count, count), share))

    def find(self, numbers: ir.Value, begin: ir.Value, count: ir.Value) -> None:
        """Ranks `count` columns, numbers[begin], .... They are all different."""
        line = vector_of(_LANES, self._element)
        none, one = (arith.constant(line, ir.DenseElementsAttr.get_splat(line, self._number(each))) for each in (0, 1))
        with loop(index(0), count, index(_LANES)) as groups:
            at = groups.induction_variable
            mask = mask_of(_LANES, arith.subi(count, at))
            mine = vector.maskedload(line, numbers, [arith.addi(begin, at)], mask, none)
            with rolled(begin, arith.addi(begin, count), [none]) as others:
                other = vector.broadcast(line, memref.load(numbers, [others.induction_variable]))
                before = arith.cmpi(arith.CmpIPredicate.ult, other, mine)
                ranks = others.inner_iter_args[0]
                scf.YieldOp([arith.select(before, arith.addi(ranks, one), ranks)])
            line_of_columns = arith.muli(at, index(2))
            vector.store(mine, self._lines, [line_of_columns])
            vector.store(others.results[0], self._lines, [arith.addi(line_of_columns, index(_LANES))])

    @contextmanager
    def each(self, count: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """Makes a loop over the `count` ranked columns. Yields a column and its rank, as indices."""
        with loop(index(0), count, index(_LANES)) as groups:
            at = groups.induction_variable
            first = arith.muli(at, index(2))
            with rolled(index(0), arith.minui(arith.subi(count, at), index(_LANES))) as numbers:
                place = arith.addi(first, numbers.induction_variable)
                yield load_index(self._lines, place), load_index(self._lines, arith.addi(place, index(_LANES)))

    def _number(self, value: int) -> ir.IntegerAttr:
        return ir.IntegerAttr.get(self._element, value)


def _places(columns: ir.Value) -> ir.Value:
    """Returns the places of the memory: the most columns of a row, and a vector's lanes more."""
    return arith.addi(arith.muli(arith.divui(columns, index(_STEPS * _LANES)), index(_LANES)), index(_SHORT + 2 * _LANES))


def _bytes(element: ir.Type) -> int:
    return 8 if isinstance(element, ir.IndexType) else byte_width(element)
