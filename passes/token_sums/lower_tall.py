"""lower-tall: lowers a `kernel.tall_product` to tiles of a few rows and a few vectors of columns, with sums in registers.

before   %y = "kernel.tall_product"(%x, %w) {lanes = 16, vectors = 4} : (tensor<?x?xf32>, tensor<?x?xf32>) -> tensor<?x?xf32>
after    scf.parallel (%part) = ...                         // an equal share of the rows
           func.call @region_columns4(...)                  // or _columns3 ... 1: as divides the columns of y most evenly
         func.func private @region_columns4(...)
           for each 6 rows, for each 4 vectors of columns
             for each k: sums[r][v] += x[row + r, k] * w[k, columns v]        // w once for all rows, x once for all vectors
             the sums into y                                                  // columns beyond the last one masked

Nothing is packed: w is small enough for the second-level cache, and the rows of x are read once. In the last tile, rows
past the last one repeat it. Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, math, memref, scf, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import call_narrowest, index, loop, mask_of, parallel, vector_of, zeros

_ROWS = 8  # most rows of a tile: as many independent sums hide the latency of a multiply-add


@dataclass(frozen=True)
class LowerTall:
    """Lower every kernel.tall_product."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.tall_product"):
            with op.location:
                _Tall(op.opview).lower()


class _Tall:
    """y[m, n] = sum_k x[m, k] w[k, n]."""

    def __init__(self, op: Any) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        self.lanes, self.vectors = ir.IntegerAttr(op.lanes).value, ir.IntegerAttr(op.vectors).value
        self.buffers = [buffer_of(op.x), buffer_of(op.w), self.storage.output]
        self.vec = vector_of(self.lanes, ir.MemRefType(self.storage.output.type).element_type)

    def lower(self) -> None:
        functions = {count: self._function(count) for count in range(self.vectors, 0, -1)}
        x, _, y = self.buffers
        with ir.InsertionPoint(self.op):
            rows, reduced, columns = memref.dim(y, index(0)), memref.dim(x, index(1)), memref.dim(y, index(1))
            needed = arith.ceildivui(columns, index(self.lanes))
            # As few tiles as possible, of about equal width: 5 vectors are 3 and 2.
            width = arith.ceildivui(needed, arith.ceildivui(needed, index(self.vectors)))
            parts = parts_of(arith.muli(rows, reduced), needed, self.storage.threads)
            with parallel(parts) as part:
                call_narrowest(width, functions, [*self.buffers, *ends_of(rows, part, parts)])
        self.storage.erase()

    def _function(self, count: int) -> func.FuncOp:
        """Makes a function of the matrices and of rows [begin, end), in tiles of `count` vectors of columns."""
        parent = self.op.operation.parent.opview
        types = [*(buffer.type for buffer in self.buffers), *[ir.IndexType.get()] * 2]
        with ir.InsertionPoint(parent):
            function = func.FuncOp(f"{parent.name.value}_columns{count}", (types, []), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            x, w, y, begin, end = function.entry_block.arguments
            columns, width = memref.dim(y, index(1)), count * self.lanes
            together = min(_ROWS, 8 * self.vectors // (count + 1))  # 32 registers with AVX-512, 16 without
            last = arith.subi(end, index(1))
            with loop(begin, end, index(together)) as tiles:
                rows = [arith.minui(arith.addi(tiles.induction_variable, index(r)), last) for r in range(together)]
                with loop(index(0), columns, index(width)) as across:
                    self._tile(x, w, y, rows, across.induction_variable, columns, count)
            func.ReturnOp([])
        return function

    def _tile(
        self, x: ir.Value, w: ir.Value, y: ir.Value, rows: Sequence[ir.Value], first: ir.Value, columns: ir.Value, count: int
    ) -> None:
        """Computes the sums of these rows and of `count` vectors of columns from the first one on."""
        at = [arith.addi(first, index(v * self.lanes)) for v in range(count)]
        masks = [mask_of(self.lanes, arith.subi(arith.maxui(columns, start), start)) for start in at]
        zero, reduced = zeros(self.vec), memref.dim(x, index(1))
        following, line = arith.addi(rows[0], index(len(rows))), self._line(x)
        after = arith.muli(following, reduced)
        with loop(index(0), reduced, index(1), [zero] * (len(rows) * count)) as reduction:
            k, sums = reduction.induction_variable, list(reduction.inner_iter_args)
            ahead = arith.addi(after, arith.muli(k, index(len(rows))))
            memref.prefetch(line, [ahead], False, 3, True)
            weights = [vector.maskedload(self.vec, w, [k, start], mask, zero) for start, mask in zip(at, masks, strict=True)]
            for r, row in enumerate(rows):
                element = vector.broadcast(self.vec, memref.load(x, [row, k]))
                for v, weight in enumerate(weights):
                    sums[r * count + v] = math.fma(element, weight, sums[r * count + v])
            scf.YieldOp(sums)
        for r, row in enumerate(rows):
            for v, (start, mask) in enumerate(zip(at, masks, strict=True)):
                vector.maskedstore(y, [row, start], mask, reduction.results[r * count + v])

    def _line(self, x: ir.Value) -> ir.Value:
        """Returns x as a vector."""
        open_ = ir.ShapedType.get_dynamic_size()
        type_, size = ir.MemRefType.get([open_], self.vec.element_type), arith.muli(*(memref.dim(x, index(d)) for d in (0, 1)))
        return memref.ReinterpretCastOp(type_, x, [], [size], [], [0], [open_], [1]).result
