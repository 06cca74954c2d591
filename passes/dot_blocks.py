"""The innermost loop of a product with blocks of bf16 whose tokens are in the lanes: what a few rows' blocks add to their sums.

scf.for %b = %begin to %end iter_args(4 rows x 4 vectors of sums)
  for each pair of the block's columns:
    two columns of x, interleaved                // 4 vectors of pairs, shared by the rows
    x86.avx512.dot(sums, a row's pair in all lanes, 16 tokens' pairs)       // 16 of them
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector, x86

from gossamer.dialects.packing import Vnni
from gossamer.passes.columns import pairs_of
from gossamer.passes.vectors import in_all_lanes, index, load_index, loop, vector_of

HEIGHT = 4
"""Rows whose sums are in registers."""

_TILE = 16  # rows of a tile of a block
_UNROLLED = 4  # pairs of columns


@dataclass(frozen=True)
class DotBlocks:
    """A weight in blocks for dot products, and `packed`: x as columns of bf16 (columns.py), tokens in lanes."""

    storage: Vnni
    positions: ir.Value
    coordinates: ir.Value
    values: ir.Value
    packed: ir.Value
    vectors: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums (all vectors of a row, then those of the next) + what the blocks of rows 4 group to 4 group + 3 give. There is
        one `panel`."""
        rows, width = self.storage.rows, self.storage.columns
        row = arith.muli(group, index(HEIGHT))
        strip, within = arith.divui(row, index(rows)), arith.remui(row, index(rows))
        tile = arith.muli(arith.divui(within, index(_TILE)), index(_TILE * width))
        offset = arith.addi(tile, arith.muli(arith.remui(within, index(_TILE)), index(2)))
        begin, end = (load_index(self.positions, at) for at in (strip, arith.addi(strip, index(1))))
        with loop(begin, end, index(1), sums) as blocks:
            block = blocks.induction_variable
            k = arith.muli(load_index(self.coordinates, block), index(width))
            first = arith.addi(arith.muli(block, index(rows * width)), offset)
            step = min(width // 2, _UNROLLED)
            with loop(index(0), index(width // 2), index(step), list(blocks.inner_iter_args)) as pairs:
                totals = list(pairs.inner_iter_args)
                for i in range(step):
                    pair = arith.addi(pairs.induction_variable, index(i))
                    column = arith.addi(k, arith.muli(pair, index(2)))
                    totals = self._pair(column, arith.addi(first, arith.muli(pair, index(2 * _TILE))), totals)
                scf.YieldOp(totals)
            scf.YieldOp(list(pairs.results))
        return list(blocks.results)

    def _pair(self, column: ir.Value, at: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + the rows' pairs from `at` on * two columns of x."""
        x = pairs_of(self.packed, self.vectors, column, arith.addi(column, index(1)))
        pair, found = vector_of(2, ir.MemRefType(self.values.type).element_type), []
        for row in range(HEIGHT):
            weight = in_all_lanes(vector.load(pair, self.values, [arith.addi(at, index(2 * row))]))
            mine = sums[row * self.vectors : (row + 1) * self.vectors]
            found += [x86.DotBF16Op(total, weight, given).result for total, given in zip(mine, x, strict=True)]
        return found
