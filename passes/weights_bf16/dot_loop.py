"""The innermost loop of a product with blocks of bf16, with tokens in lanes. It adds the products of a few rows to their sums.

scf.for %b = %begin to %end iter_args(4 rows x 4 vectors of sums)       // or 8 x 2, 16 x 1
  for each pair of the block's columns:
    a line of x (bf16_pairs.py)                  // 4 vectors of pairs, shared by the rows
    x86.avx512.dot(sums, a row's pair in all lanes, 16 tokens' pairs)       // 16 of them
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector, x86

from gossamer.dialects.packing import Vnni
from gossamer.passes.loops.inner_loop import InnerLoop
from gossamer.passes.loops.vectors import in_all_lanes, index, load_index, loop, vector_of
from gossamer.passes.weights_bf16.bf16_pairs import LINE

HEIGHT = 16
"""Rows of a tile of a block."""

_SUMS = 16  # vectors of sums in registers
_UNROLLED = 4  # pairs of columns in a step of the loop


def rows_at_once(vectors: int) -> int:
    """Returns the rows whose sums fit into registers for this number of vectors of tokens: a divisor of 16."""
    return max(rows for rows in (1, 2, 4, 8, HEIGHT) if rows * vectors <= _SUMS)


@dataclass(frozen=True)
class DotBlocks(InnerLoop):
    """Inner loops for a weight in blocks for dot products. x is packed as lines of pairs (bf16_pairs.py)."""

    storage: Vnni

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of the blocks of a group of rows. There is only one panel."""
        rows, width = self.storage.rows, self.storage.columns
        row = arith.muli(group, index(len(sums) // self.vectors))
        strip, within = arith.divui(row, index(rows)), arith.remui(row, index(rows))
        tile = arith.muli(arith.divui(within, index(HEIGHT)), index(HEIGHT * width))
        offset = arith.addi(tile, arith.muli(arith.remui(within, index(HEIGHT)), index(2)))
        begin, end = self.entries(strip)
        with loop(begin, end, index(1), sums) as blocks:
            block = blocks.induction_variable
            line = arith.muli(load_index(self.coordinates, block), index(width // 2))
            first = arith.addi(arith.muli(block, index(rows * width)), offset)
            step = min(width // 2, _UNROLLED)
            with loop(index(0), index(width // 2), index(step), list(blocks.inner_iter_args)) as pairs:
                totals = list(pairs.inner_iter_args)
                for i in range(step):
                    pair = arith.addi(pairs.induction_variable, index(i))
                    at = arith.addi(first, arith.muli(pair, index(2 * HEIGHT)))
                    totals = self._pair(arith.addi(line, pair), at, totals)
                scf.YieldOp(totals)
            scf.YieldOp(list(pairs.results))
        return list(blocks.results)

    def _pair(self, line: ir.Value, at: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the rows' pairs, from `at` on, times two columns of x."""
        element = ir.MemRefType(self.values.type).element_type
        pairs, pair, found = vector_of(LINE, element), vector_of(2, element), []
        x = [vector.load(pairs, self.packed, [line, index(v * LINE)]) for v in range(self.vectors)]
        for row in range(len(sums) // self.vectors):
            weight = in_all_lanes(vector.load(pair, self.values, [arith.addi(at, index(2 * row))]))
            mine = sums[row * self.vectors : (row + 1) * self.vectors]
            found += [x86.DotBF16Op(total, weight, given).result for total, given in zip(mine, x, strict=True)]
        return found
