"""The innermost loops of a K-blocked product. They add the products of a row's nonzeros in a block of columns to its sums.

scf.for %p = %begin to %end iter_args(4 vectors of sums)
  vector.fma(values[p], x[coordinates[p]][0..63], sums)
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.passes.loops.inner_loop import InnerLoop, add_in_turns
from gossamer.passes.loops.vectors import index, load_index

_LONG_ROW = 48  # fewest nonzeros of a long row in a block


@dataclass(frozen=True)
class KBlockRows(InnerLoop):
    """Inner loops for a weight of `rows` x K in blocks of `columns` columns."""

    rows: int
    columns: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of row `group`'s nonzeros in this block of columns."""
        begin, end = self.entries(arith.addi(arith.muli(panel, index(self.rows)), group))
        add = partial(self._multiply_add, arith.muli(panel, index(self.columns)))
        return add_in_turns(begin, end, max(2, 4 // self.vectors), _LONG_ROW, sums, add)

    def _multiply_add(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus values[p] times the column of x for p."""
        k = arith.addi(origin, load_index(self.coordinates, p))
        weight = self.value(p)
        return [vector.fma(weight, x, total) for x, total in zip(self.x(k), sums, strict=True)]
