"""The innermost loop of a product with small dense blocks. It adds the products of a group's blocks to the sums of its rows.

scf.for %p = %begin to %end iter_args(4 rows x 4 vectors of sums)
  for each column of the block:                   // unrolled
    x[coordinates[p] + column][0..63]             // 4 loads, shared by the rows
    vector.fma(values[p][column][row], x, sums)   // 16, each row's value in all lanes
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.packing import Blocks
from gossamer.passes.loops.inner_loop import InnerLoop, added_up, sets_of
from gossamer.passes.loops.vectors import index, load_index, loop

_CHAINS = 8  # independent sums that keep two multiply-adds a cycle busy, each of which takes four cycles


@dataclass(frozen=True)
class BlockRows(InnerLoop):
    """Inner loops for a weight in blocks, with `groups` groups of rows."""

    storage: Blocks
    groups: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of the group's blocks in this panel of columns."""
        begin, end = self.entries(arith.addi(arith.muli(panel, index(self.groups)), group))
        origin = arith.muli(panel, index(self.storage.width))
        count = len(sums)
        ways = min(self.storage.columns, max(1, _CHAINS // count))
        with loop(begin, end, index(1), sets_of(sums, ways)) as blocks:
            scf.YieldOp(self._block(origin, blocks.induction_variable, list(blocks.inner_iter_args), count))
        return added_up(list(blocks.results), count)

    def _block(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value], count: int) -> list[ir.Value]:
        """Returns the sums plus the products of one block. Its columns take turns with the sets of sums."""
        height, width = self.storage.rows, self.storage.columns
        first = arith.addi(origin, load_index(self.coordinates, p))
        start = arith.muli(p, index(height * width))
        for column in range(width):
            k, way = arith.addi(first, index(column)), column * count % len(sums)
            x = list(self.x(k))
            for row in range(height):
                weight = self.value(arith.addi(start, index(column * height + row)))
                for v in range(self.vectors):
                    at = way + row * self.vectors + v
                    sums[at] = vector.fma(weight, x[v], sums[at])
        return sums
