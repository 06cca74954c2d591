"""The innermost loop of a product with small dense blocks: what the blocks of a group of rows add to its sums.

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

_CHAINS = 8  # sums that keep two multiply-adds a cycle of four cycles each going


@dataclass(frozen=True)
class BlockRows(InnerLoop):
    """For a weight in blocks, of `groups` groups of rows."""

    storage: Blocks
    groups: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums (all vectors of a row, then those of the next) + what the group's blocks in this panel of columns give."""
        begin, end = self.entries(arith.addi(arith.muli(panel, index(self.groups)), group))
        origin = arith.muli(panel, index(self.storage.width))
        count = len(sums)
        ways = min(self.storage.columns, max(1, _CHAINS // count))
        with loop(begin, end, index(1), sets_of(sums, ways)) as blocks:
            scf.YieldOp(self._block(origin, blocks.induction_variable, list(blocks.inner_iter_args), count))
        return added_up(list(blocks.results), count)

    def _block(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value], count: int) -> list[ir.Value]:
        """One block; its columns take turns with the sets of sums."""
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
