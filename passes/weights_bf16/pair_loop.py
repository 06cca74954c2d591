"""The innermost loop of a product of pairs: what the pairs of nonzeros of a row in a block of columns add to its sums.

scf.for %p = %begin to %end iter_args(4 vectors of sums)
  x86.avx512.dot(sums, pair p of weights in all lanes, its two columns of x, interleaved)
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector, x86

from gossamer.passes.loops.vectors import in_all_lanes, index, load_index, loop, vector_of, zeros
from gossamer.passes.weights_bf16.bf16_columns import pairs_of

_LONG_ROW = 8  # pairs of a row in a block from which on a row counts as long
_WAYS = 2  # pairs of a long row that are multiplied independently


@dataclass(frozen=True)
class PairRows:
    """A weight of `rows` x K in blocks of `width` columns, and `packed`: x as columns (bf16_columns.py), tokens in lanes."""

    rows: int
    width: int
    positions: ir.Value
    coordinates: ir.Value
    values: ir.Value
    packed: ir.Value
    vec: ir.VectorType
    vectors: int

    def add(self, block: ir.Value, m: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + the products of row m's pairs in this block with their columns of x.

        Long rows are taken several pairs at a time, each with sums of its own.
        """
        count, origin = len(sums), arith.muli(block, index(self.width))
        at = arith.addi(arith.muli(block, index(self.rows)), m)
        begin, end = load_index(self.positions, at), load_index(self.positions, arith.addi(at, index(1)))
        pairs = arith.subi(end, begin)
        long = arith.cmpi(arith.CmpIPredicate.uge, pairs, index(_LONG_ROW))
        whole = arith.select(long, arith.subi(pairs, arith.remui(pairs, index(_WAYS))), index(0))
        middle = arith.addi(begin, whole)
        with loop(begin, middle, index(_WAYS), sums + [zeros(self.vec)] * (count * (_WAYS - 1))) as several:
            totals = list(several.inner_iter_args)
            for way in range(_WAYS):
                mine = slice(way * count, (way + 1) * count)
                totals[mine] = self._pair(origin, arith.addi(several.induction_variable, index(way)), totals[mine])
            scf.YieldOp(totals)
        first, *others = (list(several.results)[way * count : (way + 1) * count] for way in range(_WAYS))
        with loop(middle, end, index(1), first) as rest:
            scf.YieldOp(self._pair(origin, rest.induction_variable, list(rest.inner_iter_args)))
        totals = list(rest.results)
        for other in others:
            totals = [arith.addf(a, b) for a, b in zip(totals, other, strict=True)]
        return totals

    def _pair(self, origin: ir.Value, pair: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + two values of the weight * their columns of x."""
        at, element = arith.muli(pair, index(2)), ir.MemRefType(self.values.type).element_type
        ks = [arith.addi(origin, load_index(self.coordinates, arith.addi(at, index(i)))) for i in (0, 1)]
        weights = in_all_lanes(vector.load(vector_of(2, element), self.values, [at]))
        found = pairs_of(self.packed, range(self.vectors), *ks)
        return [x86.DotBF16Op(total, weights, x).result for total, x in zip(sums, found, strict=True)]
