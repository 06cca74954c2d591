"""The innermost loops of a K-blocked product: what the nonzeros of a row in a block of columns add to its sums.

scf.for %p = %begin to %end iter_args(4 vectors of sums)
  vector.fma(values[p], x[coordinates[p]][0..63], sums)
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.inner_loop import InnerLoop, add_in_turns
from gossamer.passes.loops.vectors import index, load_index

_LONG_ROW = 48  # nonzeros of a row in a block from which on a row counts as long


@dataclass(frozen=True)
class KBlockRows(InnerLoop):
    """For a weight of `rows` x K in blocks of `columns`."""

    rows: int
    columns: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + the products of row `group`'s nonzeros in this block of columns with their columns of x."""
        begin, end = self.entries(arith.addi(arith.muli(panel, index(self.rows)), group))
        add = partial(self._multiply_add, arith.muli(panel, index(self.columns)))
        return add_in_turns(begin, end, max(2, 4 // self.vectors), _LONG_ROW, sums, add)

    def _multiply_add(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + values[p] * packed[column of p]."""
        k = arith.addi(origin, load_index(self.coordinates, p))
        weight = self.value(p)
        return [vector.fma(weight, x, total) for x, total in zip(self.x(k), sums, strict=True)]
