"""lower-gather: a `kernel.spmm` of the schedule "gather" becomes loops that gather x along each row, for a few tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gather", tile = [4], ...} : ... tensor<3072x768xf32, #CSR>
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
from math import inf
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, Product, products
from gossamer.passes.loops.vectors import (
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

_TOKENS = 4  # tokens that share the loads of a row
_NONZERO, _ROW = 10.5, 10.0
_FEW = 3  # tokens up to which it may be the fastest


def _storage(matrix: Matrix) -> Format:
    """CSR (CSC if the matrix is stored transposed) with coordinates as narrow as they can be."""
    rows = Format.CSR if matrix.reduction == 1 else Format.CSC
    return rows.with_widths(32, 16 if matrix.columns <= 1 << 16 else 32)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens]"""
    return (_TOKENS,) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per token: 10.5 nnz / L for the gathers, 10 M for start, end and total of the rows. Narrow vectors gather too slowly."""
    if matrix.bits < 512:
        return inf
    several = 4 if tokens == 3 else tokens
    return several * (_NONZERO * matrix.nonzeros / matrix.lanes + _ROW * matrix.rows)


GATHER = Family("gather", _storage, _tile, _cycles, most=_FEW)


@dataclass(frozen=True)
class LowerGather:
    """Lower products that gather to scf and vector."""

    name: ClassVar[str] = "lower-gather"

    def run(self, module: ir.Module) -> None:
        for op in products(module, GATHER.name):
            gather = _Gather(op)
            reserve_workspace(module, gather.workspace)
            _lower(gather)


class _Gather(Product):
    """A product, `tokens` at a time."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        tile = integers(op.tile)
        if tile not in ([1], [2], [4]):
            raise CompileError(f"tile {tile} is not one of 1, 2 or 4 tokens")
        (self.tokens,) = tile
        self.workspace = self.tokens * self.lanes * byte_width(self.sum_type)

    def work_before(self, row: ir.Value) -> ir.Value:
        """By nonzeros: where a row starts and ends costs about as much as one vector of them."""
        return self.stored_before(row, 1, self.lanes)

    def cycles(self, values: ir.Value, tokens: ir.Value) -> ir.Value:
        """One for each element that is gathered."""
        return arith.muli(values, tokens)


def _lower(gather: _Gather) -> None:
    widths = [n for n in (4, 2, 1) if n <= gather.tokens]
    with gather.op.location:
        variants = {n: gather.function(f"rows{n}", partial(_emit_rows, gather, n)) for n in widths}
        gather.by_rows(variants, gather.tokens, gather.workspace)


def _emit_rows(gather: _Gather, count: int, operands: Operands) -> None:
    _Rows(gather, count, operands).emit()


class _Rows:
    """Emits the body of a function that computes `count` tokens."""

    def __init__(self, gather: _Gather, count: int, operands: Operands) -> None:
        self.gather, self.lanes, self.count = gather, gather.lanes, count
        self.operands, self.memory = operands, operands.memory
        self.vec = vector_of(self.lanes, gather.sum_type)
        last = arith.subi(self.memory.tokens, index(1))
        self.tokens = [arith.addi(operands.first, index(t)) for t in range(count)]
        self.safe_tokens = [arith.minui(t, last) for t in self.tokens]

    def emit(self) -> None:
        lanes, totals_type = index(self.lanes), ir.MemRefType.get([self.count, self.lanes], self.gather.sum_type)
        totals = memref.view(totals_type, self.operands.workspace, self.operands.offset, [])
        with loop(self.operands.low, self.operands.high, index(1)) as groups:
            row = arith.muli(groups.induction_variable, lanes)
            row_end = arith.minui(arith.addi(row, lanes), index(self.gather.M))
            with loop(row, row_end, index(1)) as rows:
                m = rows.induction_variable
                for t, sums in enumerate(self._row(m)):
                    fast = ir.Attribute.parse("#arith.fastmath<reassoc>")
                    total = vector.reduction(self.gather.sum_type, _add(), sums, fastmath=fast)
                    memref.store(total, totals, [index(t), arith.subi(m, row)])
            for t, token in enumerate(self.tokens):
                finish = partial(self.gather.epilogue.every, vector.load(self.vec, totals, [index(t), index(0)]))
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
