"""The innermost loop of a product with small dense blocks: what the blocks of a group of rows add to its sums.

scf.for %p = %begin to %end iter_args(4 rows x 4 vectors of sums)
  for each column of the block:                   // unrolled
    x[coordinates[p] + column][0..63]             // 4 loads, shared by the rows
    vector.fma(values[p][column][row], x, sums)   // 16, each row's value in all lanes
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.packing import Blocks
from gossamer.passes.loops.vectors import index, load_index, loop, widened, zeros

_CHAINS = 8  # sums that keep two multiply-adds a cycle of four cycles each going


@dataclass(frozen=True)
class BlockRows:
    """A weight in blocks, `groups` groups of rows, and `packed`: x as [K][`vectors` of type `vec`], tokens in lanes."""

    storage: Blocks
    groups: int
    positions: ir.Value
    coordinates: ir.Value
    values: ir.Value
    packed: ir.Value
    vec: ir.VectorType
    vectors: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums (all vectors of a row, then those of the next) + what the group's blocks in this panel of columns give."""
        at = arith.addi(arith.muli(panel, index(self.groups)), group)
        begin = load_index(self.positions, at)
        end = load_index(self.positions, arith.addi(at, index(1)))
        origin = arith.muli(panel, index(self.storage.width))
        count = len(sums)
        ways = min(self.storage.columns, max(1, _CHAINS // count))
        with loop(begin, end, index(1), sums + [zeros(self.vec)] * (count * (ways - 1))) as blocks:
            scf.YieldOp(self._block(origin, blocks.induction_variable, list(blocks.inner_iter_args), count))
        totals, *others = (list(blocks.results)[way * count : (way + 1) * count] for way in range(ways))
        for other in others:
            totals = [arith.addf(a, b) for a, b in zip(totals, other, strict=True)]
        return totals

    def _block(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value], count: int) -> list[ir.Value]:
        """One block; its columns take turns with the sets of sums."""
        height, width = self.storage.rows, self.storage.columns
        lanes, element = self.vec.shape[0], self.vec.element_type
        first = arith.addi(origin, load_index(self.coordinates, p))
        start = arith.muli(p, index(height * width))
        for column in range(width):
            k, way = arith.addi(first, index(column)), column * count % len(sums)
            x = [vector.load(self.vec, self.packed, [k, index(v * lanes)]) for v in range(self.vectors)]
            for row in range(height):
                value = memref.load(self.values, [arith.addi(start, index(column * height + row))])
                weight = vector.broadcast(self.vec, widened(value, element))
                for v in range(self.vectors):
                    at = way + row * self.vectors + v
                    sums[at] = vector.fma(weight, x[v], sums[at])
        return sums
