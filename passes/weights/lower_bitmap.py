"""lower-bitmap: a `kernel.spmm` of the schedule "bitmap" becomes loops that expand the nonzeros of a row, for a few tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "bitmap", tile = [8], ...} : ... tensor<..., "bitmap(...)">
after    scf.parallel (%task) = ...                    // chunks of the weight's rows
           for each 8 tokens: func.call @region_rows8  // or _rows4, _rows2, _rows1 for what is left of the tokens
         func.func private @region_rows8(...)
           the tokens of x into the workspace, widened to the type of the sums and filled up with zeros
           for each group of 16 rows, each 2 or 4 of them at once, a row:
             scf.for each mask of the row iter_args(%q, sums)
               vector.expandload values[q] by the mask: 16 columns of the row; one multiply-add a token
               q + the bits that are set in the mask
             the sums' total                           // 16 rows' totals make a vector of results
           through the epilogue into y

The weight is read as its nonzeros and a bit for each element, the least there is for half of them. Columns without a nonzero
are masked, so that an infinity or a NaN in x reaches no row that does not use it. Runs on functions whose storage is exposed
(expose-storage).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Bitmap, Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import index, load_index, loop, splat_of, vector_of, widened, zeros
from gossamer.passes.weights.few_tokens import FewTokens, TokenRows

_TOKENS = 8  # tokens that share the expanded weights
_MASK, _TOKEN, _ROW = 1.8, 1.2, 5.0
_ROWS = {8: 2, 4: 4, 2: 4, 1: 4}  # rows that share the loads of x, by the tokens


def _storage(matrix: Matrix) -> Bitmap | None:
    """A bitmap, where an instruction expands by a mask: LLVM has one for 16 bits, but not as floats."""
    expands = matrix.bits == 512 and matrix.element in ("f32", "f64")
    return Bitmap(matrix.reduction, matrix.lanes) if expands else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens]"""
    return (_TOKENS,) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of t tokens: 1.8 + 1.2 t for every L elements, nonzero or not; 5 t a row for its totals; K t / L for the copy of
    x."""
    m, blocks = matrix.rows, -(-matrix.columns // matrix.lanes)
    full, left = divmod(tokens, _TOKENS)
    tiles = [_TOKENS] * full + ([1 << (left - 1).bit_length()] if left else [])
    return sum(m * blocks * (_MASK + _TOKEN * t) + _ROW * m * t + blocks * t for t in tiles)


BITMAP = Family("bitmap", _storage, _tile, _cycles, most=_TOKENS)


@dataclass(frozen=True)
class LowerBitmap:
    """Lower products that expand nonzeros to scf and vector."""

    name: ClassVar[str] = "lower-bitmap"

    def run(self, module: ir.Module) -> None:
        for op in products(module, BITMAP.name):
            lanes, size = ir.IntegerAttr(op.lanes).value, ir.RankedTensorType(op.x.type).shape[1]
            bitmap = FewTokens(op, -(-size // lanes) * lanes)
            widths = [n for n in (8, 4, 2, 1) if n <= bitmap.tokens]
            bitmap.lower(module, widths, partial(_emit_rows, bitmap))


def _emit_rows(bitmap: FewTokens, count: int, operands: Operands) -> None:
    _Rows(bitmap, count, operands).emit()


class _Rows(TokenRows):
    """Emits the body of a function that computes `count` tokens."""

    def __init__(self, bitmap: FewTokens, count: int, operands: Operands) -> None:
        super().__init__(bitmap, count, operands)
        self.positions, self.masks, self.values = operands.weight
        self.vectors = bitmap.padded_K // self.lanes
        self.rows = _ROWS[count]

    def emit(self) -> None:
        x, totals, lanes = self.copy_of_x(), self.totals(), index(self.lanes)
        fast, add = ir.Attribute.parse("#arith.fastmath<reassoc>"), ir.Attribute.parse("#vector.kind<add>")
        with loop(self.operands.low, self.operands.high, index(1)) as groups:
            row = arith.muli(groups.induction_variable, lanes)
            row_end = arith.minui(arith.addi(row, lanes), index(self.product.M))
            with loop(row, row_end, index(self.rows)) as rows:
                m = rows.induction_variable
                for i, sums in enumerate(self._sums(x, m)):
                    total = vector.reduction(self.product.sum_type, add, sums, fastmath=fast)
                    slot = arith.addi(arith.subi(m, row), index(i // self.count))
                    memref.store(total, totals, [index(i % self.count), slot])
            self.store(row, [vector.load(self.vec, totals, [index(t), index(0)]) for t in range(self.count)])

    def _sums(self, x: ir.Value, m: ir.Value) -> list[ir.Value]:
        """One vector of partial sums for each of the rows from m on and each token; rows past the last one repeat it."""
        ms = [arith.minui(arith.addi(m, index(r)), index(self.product.M - 1)) for r in range(self.rows)]
        masks = [arith.muli(each, index(self.vectors)) for each in ms]
        carried = [*(load_index(self.positions, each) for each in ms), *[zeros(self.vec)] * (self.count * self.rows)]
        with loop(index(0), index(self.vectors), index(1), carried) as vectors:
            places, sums = list(vectors.inner_iter_args)[: self.rows], list(vectors.inner_iter_args)[self.rows :]
            k = arith.muli(vectors.induction_variable, index(self.lanes))
            tokens = [vector.load(self.vec, x, [index(t), k]) for t in range(self.count)]
            for r in range(self.rows):
                mask, count = self._mask(arith.addi(masks[r], vectors.induction_variable))
                weights = self._expanded(places[r], mask)
                for i, token in enumerate(tokens, r * self.count):
                    sums[i] = arith.select(mask, vector.fma(weights, token, sums[i]), sums[i])
                places[r] = arith.addi(places[r], count)
            scf.YieldOp([*places, *sums])
        return list(vectors.results)[self.rows :]

    def _mask(self, at: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A mask, and how many bits are set in it."""
        bits = memref.load(self.masks, [at])
        in_lanes = vector.broadcast(vector_of(1, bits.type), bits)
        mask = vector.bitcast(vector_of(self.lanes, ir.IntegerType.get_signless(1)), in_lanes)
        wide = arith.extui(ir.IntegerType.get_signless(32), bits)
        return mask, arith.index_castui(ir.IndexType.get(), math.ctpop(wide))

    def _expanded(self, at: ir.Value, mask: ir.Value) -> ir.Value:
        """values[at..], one after the other in the lanes of the mask.

        The other lanes are not used. They are not set to 0, for which LLVM has a form of the instruction that on AMD's Zen 4
        waits for the last use of its register.
        """
        stored = vector_of(self.lanes, ir.MemRefType(self.values.type).element_type)
        return widened(vector.expandload(stored, self.values, [at], mask, splat_of(stored, 1.0)), self.vec)
