"""The innermost loops of a K-blocked product: what the nonzeros of a row in a block of columns add to its sums.

scf.for %p = %begin to %end iter_args(4 vectors of sums)
  vector.fma(values[p], x[coordinates[p]][0..63], sums)
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.loops.vectors import index, load_index, loop, widened, zeros

_LONG_ROW = 48  # nonzeros of a row in a block from which on a row counts as long


@dataclass(frozen=True)
class KBlockRows:
    """A weight of `rows` x K in blocks of `columns`, and `packed`: x as [K][`vectors` of type `vec`], tokens in lanes."""

    rows: int
    columns: int
    positions: ir.Value
    coordinates: ir.Value
    values: ir.Value
    packed: ir.Value
    vec: ir.VectorType
    vectors: int

    def add(self, block: ir.Value, m: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + the products of row m's nonzeros in this block with their columns of x."""
        at = arith.addi(arith.muli(block, index(self.rows)), m)
        begin = load_index(self.positions, at)
        end = load_index(self.positions, arith.addi(at, index(1)))
        return self._nonzeros(arith.muli(block, index(self.columns)), begin, end, sums)

    def _nonzeros(self, origin: ir.Value, begin: ir.Value, end: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """A fused multiply-add takes four cycles, so long rows are taken several nonzeros at a time, each with sums of its
        own. In short rows the loop for what is left over would cost more than that gains.
        """
        ways, width = max(2, 4 // self.vectors), self.vectors
        count = arith.subi(end, begin)
        long = arith.cmpi(arith.CmpIPredicate.uge, count, index(_LONG_ROW))
        in_groups = arith.select(long, arith.subi(count, arith.remui(count, index(ways))), index(0))
        middle = arith.addi(begin, in_groups)
        several = sums + [zeros(self.vec)] * (width * (ways - 1))
        with loop(begin, middle, index(ways), several) as groups:
            totals = list(groups.inner_iter_args)
            for way in range(ways):
                at, mine = arith.addi(groups.induction_variable, index(way)), slice(way * width, (way + 1) * width)
                totals[mine] = self._multiply_add(origin, at, totals[mine])
            scf.YieldOp(totals)
        first, *others = (list(groups.results)[way * width : (way + 1) * width] for way in range(ways))
        with loop(middle, end, index(1), first) as rest:
            scf.YieldOp(self._multiply_add(origin, rest.induction_variable, list(rest.inner_iter_args)))
        totals = list(rest.results)
        for other in others:
            totals = [arith.addf(a, b) for a, b in zip(totals, other, strict=True)]
        return totals

    def _multiply_add(self, origin: ir.Value, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + values[p] * packed[column of p]."""
        k = arith.addi(origin, load_index(self.coordinates, p))
        weight = vector.broadcast(self.vec, widened(memref.load(self.values, [p]), self.vec.element_type))
        lanes = self.vec.shape[0]
        return [
            vector.fma(weight, vector.load(self.vec, self.packed, [k, index(v * lanes)]), total) for v, total in enumerate(sums)
        ]
