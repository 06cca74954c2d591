"""The innermost loop of a product of pairs. It adds the products of a row's pairs in a block of columns to its sums.

scf.for %p = %begin to %end iter_args(4 vectors of sums)
  x86.avx512.dot(sums, pair p of weights in all lanes, its two columns of x, interleaved)       // or NEON's bfdot
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, vector, x86

from gossamer.passes.loops.inner_loop import InnerLoop, add_in_turns
from gossamer.passes.loops.vectors import in_all_lanes, index, load_index, vector_of
from gossamer.passes.weights_bf16.bf16_columns import pairs_of

_LONG_ROW = 8  # fewest pairs of a long row in a block
_WAYS = 2  # pairs of a long row that are multiplied independently


@dataclass(frozen=True)
class PairRows(InnerLoop):
    """Inner loops for a weight of `rows` x K in blocks of `width` columns. x is packed as columns (bf16_columns.py)."""

    rows: int
    width: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of row `group`'s pairs in this block of columns."""
        origin = arith.muli(panel, index(self.width))
        begin, end = self.entries(arith.addi(arith.muli(panel, index(self.rows)), group))
        return add_in_turns(begin, end, _WAYS, _LONG_ROW, sums, partial(self._pair, origin))

    def _pair(self, origin: ir.Value, pair: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus two values of the weight times their columns of x."""
        at, element = arith.muli(pair, index(2)), ir.MemRefType(self.values.type).element_type
        first, second = (arith.addi(origin, load_index(self.coordinates, arith.addi(at, index(i)))) for i in (0, 1))
        lanes = self.vec.shape[0]
        weights = in_all_lanes(vector.load(vector_of(2, element), self.values, [at]), lanes)
        found = pairs_of(self.packed, range(self.vectors), first, second, lanes)
        return [_dot(total, weights, x) for total, x in zip(sums, found, strict=True)]


def _dot(sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    """Returns the sums plus the products of pairs, by the instruction for vectors of this width."""
    if ir.VectorType(sums.type).shape[0] > 4:
        return x86.DotBF16Op(sums, weights, x).result
    return llvm.call_intrinsic(sums.type, "llvm.aarch64.neon.bfdot.v4f32.v8bf16", [sums, weights, x], [], [])
