"""lower-sample-blocks: lowers a `kernel.sample_blocks` to AVX512-BF16's dot products, with 16 vectors of sums at once.

before   %v = "kernel.sample_blocks"(%positions, %coordinates, %x, %y) : (..., tensor<?x?x64xbf16>, ...) -> tensor<?xbf16>
after    scf.parallel (%part) = ...                                  // rows of blocks of the part
           for each row of blocks i, each of its blocks (i, j), each 8 of its 32 rows     // all 16 rows if blocks are 16 wide
             for each pair of tokens t:  iter_args(8 rows x 2 vectors of columns)
               x86.avx512.dot(sums, a row's pair in all lanes, y[j, t])
             store the rounded sums at the places of the rows' entries of the block

A block's panels of x and y, 8 KB each for 128 tokens, stay in the first-level cache. Runs on functions whose storage is
exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import parts_of, rows_of
from gossamer.passes.loops.vectors import in_all_lanes, index, load_index, loop, narrowed, parallel, vector_of, zeros

_LANES = 16
_SUMS = 16  # vectors of sums in registers


@dataclass(frozen=True)
class LowerSampleBlocks:
    """Lower sums of blocks to dot products."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sample_blocks"):
            with op.location:
                _Blocks(op).lower()


class _Blocks:
    def __init__(self, op: ir.Operation) -> None:
        self.op, self.storage = op, storage_of(op)
        self.positions, self.coordinates, self.x, self.y = (buffer_of(operand) for operand in op.operands)
        packed = ir.MemRefType(self.x.type)
        self.element, self.width = packed.element_type, packed.shape[2] // 2
        self.halves = self.width // _LANES
        self.rows = _SUMS // self.halves

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            rows = arith.subi(memref.dim(self.positions, index(0)), index(1))
            blocks, pairs = memref.dim(self.coordinates, index(0)), memref.dim(self.x, index(1))
            parts = parts_of(blocks, arith.muli(pairs, index(self.width * self.halves)), self.storage.threads)
            with parallel(parts) as part:
                low, high = rows_of(self.positions, rows, blocks, part, parts)
                with loop(low, high, index(1)) as each_row:
                    row = each_row.induction_variable
                    begin = load_index(self.positions, row)
                    end = load_index(self.positions, arith.addi(row, index(1)))
                    with loop(begin, end, index(1)) as each_block:
                        self._block(row, begin, end, each_block.induction_variable, pairs)
        self.storage.erase()

    def _block(self, row: ir.Value, begin: ir.Value, end: ir.Value, block: ir.Value, pairs: ir.Value) -> None:
        """Computes the entries of a block, one of the row's blocks [begin, end)."""
        width = index(self.width)
        column = load_index(self.coordinates, block)
        stride = arith.muli(arith.subi(end, begin), width)
        before = arith.muli(begin, index(self.width * self.width))
        first = arith.addi(before, arith.muli(arith.subi(block, begin), width))
        sums_type = vector_of(_LANES, ir.F32Type.get())
        with loop(index(0), width, index(self.rows)) as groups:
            top = groups.induction_variable
            sums = [zeros(sums_type)] * (self.rows * self.halves)
            with loop(index(0), pairs, index(1), sums) as each_pair:
                scf.YieldOp(self._pair(row, column, top, each_pair.induction_variable, list(each_pair.inner_iter_args)))
            for i, total in enumerate(each_pair.results):
                r, half = divmod(i, self.halves)
                at = arith.addi(first, arith.muli(arith.addi(top, index(r)), stride))
                values = narrowed(total, vector_of(_LANES, self.element))
                vector.store(values, self.storage.output, [arith.addi(at, index(half * _LANES))])

    def _pair(self, row: ir.Value, column: ir.Value, top: ir.Value, pair: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums of some rows from `top` on plus the products of a pair of tokens."""
        line, both = vector_of(2 * _LANES, self.element), vector_of(2, self.element)
        y = [vector.load(line, self.y, [column, pair, index(half * 2 * _LANES)]) for half in range(self.halves)]
        found = []
        for r in range(self.rows):
            at = arith.muli(arith.addi(top, index(r)), index(2))
            x = in_all_lanes(vector.load(both, self.x, [row, pair, at]))
            mine = sums[r * self.halves : (r + 1) * self.halves]
            found += [x86.DotBF16Op(total, x, given).result for total, given in zip(mine, y, strict=True)]
        return found
