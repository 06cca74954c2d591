"""lower-spmv: every `kernel.spmv` becomes loops that gather x along each row, for one or a few tokens.

before   %y = "kernel.spmv"(%x, %w) ({epilogue}) {lanes = 16, reduction = 1, tokens = 4} : ... tensor<3072x768xf32, #CSR>
after    scf.parallel (%task) = ...                    // chunks of the weight's rows
           for each 4 tokens: func.call @region_rows4  // or _rows2, _rows1 for what is left of the tokens
         func.func private @region_rows4(...)
           for each group of 16 rows, each row:
             scf.for %p step 16 iter_args(1 vector a token)
               vector.fma(values[p..], vector.gather x[token][coordinates[p..]], sums)
             the sums' total                           // 16 rows' totals make a vector of results
           through the epilogue into y

x is read as it lies in memory, nothing is packed. Runs on functions whose storage is exposed (expose-storage). The end of a
row is masked; tokens past the last one repeat it and are not stored.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.product import Operands, Product
from gossamer.passes.queries import walk
from gossamer.passes.vectors import (
    byte_width,
    index,
    load_index,
    loop,
    mask_of,
    reserve_workspace,
    vector_of,
    widened,
    zeros,
)


@dataclass(frozen=True)
class LowerSpmv:
    """Lower `kernel.spmv` to scf and vector."""

    name: ClassVar[str] = "lower-spmv"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.spmv"):
            spmv = _Spmv(op.opview)
            reserve_workspace(module, spmv.workspace)
            _lower(spmv)


class _Spmv(Product):
    """A kernel.spmv, `tokens` at a time."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        self.tokens = ir.IntegerAttr(op.tokens).value
        self.workspace = self.tokens * self.lanes * byte_width(self.sum_type)


def _lower(spmv: _Spmv) -> None:
    widths = [n for n in (4, 2, 1) if n <= spmv.tokens]
    with spmv.op.location:
        variants = {n: spmv.function(f"rows{n}", partial(_emit_rows, spmv, n)) for n in widths}
        with ir.InsertionPoint(spmv.op):
            chunks = arith.minui(index(spmv.groups), spmv.storage.threads)

            def body(chunk: ir.Value, offset: ir.Value) -> None:
                low, high = spmv.row_range(chunk, chunks)
                tokens = memref.dim(spmv.storage.output, index(0))
                with loop(index(0), tokens, index(spmv.tokens)) as tiles:
                    spmv.call(variants, offset, tiles.induction_variable, low, high)

            spmv.parallel(chunks, spmv.workspace, body)
    spmv.storage.erase()


def _emit_rows(spmv: _Spmv, count: int, operands: Operands) -> None:
    _Rows(spmv, count, operands).emit()


class _Rows:
    """Emits the body of a function that computes `count` tokens."""

    def __init__(self, spmv: _Spmv, count: int, operands: Operands) -> None:
        self.spmv, self.lanes, self.count = spmv, spmv.lanes, count
        self.operands, self.memory = operands, operands.memory
        self.vec = vector_of(self.lanes, spmv.sum_type)
        last = arith.subi(self.memory.tokens, index(1))
        self.tokens = [arith.addi(operands.first, index(t)) for t in range(count)]
        self.safe_tokens = [arith.minui(t, last) for t in self.tokens]

    def emit(self) -> None:
        lanes, totals_type = index(self.lanes), ir.MemRefType.get([self.count, self.lanes], self.spmv.sum_type)
        totals = memref.view(totals_type, self.operands.workspace, self.operands.offset, [])
        with loop(self.operands.low, self.operands.high, index(1)) as groups:
            row = arith.muli(groups.induction_variable, lanes)
            row_end = arith.minui(arith.addi(row, lanes), index(self.spmv.M))
            with loop(row, row_end, index(1)) as rows:
                m = rows.induction_variable
                for t, sums in enumerate(self._row(m)):
                    fast = ir.Attribute.parse("#arith.fastmath<reassoc>")
                    total = vector.reduction(self.spmv.sum_type, _add(), sums, fastmath=fast)
                    memref.store(total, totals, [index(t), arith.subi(m, row)])
            for t, token in enumerate(self.tokens):
                finish = partial(self.spmv.epilogue.whole, vector.load(self.vec, totals, [index(t), index(0)]))
                self.memory.store_token(token, row, self.lanes, finish)

    def _row(self, m: ir.Value) -> list[ir.Value]:
        """One vector of partial sums a token."""
        lanes = index(self.lanes)
        begin = load_index(self.operands.positions, m)
        end = load_index(self.operands.positions, arith.addi(m, index(1)))
        count = arith.subi(end, begin)
        whole = arith.addi(begin, arith.subi(count, arith.remui(count, lanes)))
        every = mask_of(self.lanes, lanes)
        with loop(begin, whole, lanes, [zeros(self.vec)] * self.count) as nonzeros:
            scf.YieldOp(self._multiply_add(nonzeros.induction_variable, every, list(nonzeros.inner_iter_args)))
        rest = mask_of(self.lanes, arith.subi(end, whole))
        return self._multiply_add(whole, rest, list(nonzeros.results))

    def _multiply_add(self, p: ir.Value, mask: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + values[p..] * x[token, coordinates[p..]] in the lanes of the mask."""
        stored = vector_of(self.lanes, ir.MemRefType(self.operands.values.type).element_type)
        read = vector_of(self.lanes, ir.MemRefType(self.operands.x.type).element_type)
        narrow = vector_of(self.lanes, ir.MemRefType(self.operands.coordinates.type).element_type)
        wide = vector_of(self.lanes, ir.IntegerType.get_signless(32))
        none = arith.constant(narrow, ir.DenseElementsAttr.get_splat(narrow, ir.IntegerAttr.get(narrow.element_type, 0)))
        columns = vector.maskedload(narrow, self.operands.coordinates, [p], mask, none)
        columns = columns if narrow == wide else arith.extui(wide, columns)
        weights = widened(vector.maskedload(stored, self.operands.values, [p], mask, zeros(stored)), self.vec)
        return [
            vector.fma(weights, widened(self._gather(read, token, columns, mask), self.vec), total)
            for token, total in zip(self.safe_tokens, sums, strict=True)
        ]

    def _gather(self, type_: ir.VectorType, token: ir.Value, columns: ir.Value, mask: ir.Value) -> ir.Value:
        return vector.gather(type_, self.operands.x, [token, index(0)], columns, mask, zeros(type_))


def _add() -> ir.Attribute:
    return ir.Attribute.parse("#vector.kind<add>")
