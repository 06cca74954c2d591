"""lower-groups: a `kernel.spmm` of the schedule "groups" multiplies groups of 4- or 8-bit integers by floats, for a few tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "groups", tile = [8], ...} : ... tensor<..., "groups(...)">
after    scf.parallel (%task) = ...                    // chunks of the weight's rows
           for each 8 tokens: func.call @region_rows8  // or _rows4, _rows2, _rows1 for what is left of the tokens
         func.func private @region_rows8(...)
           the tokens of x into the workspace, widened to f32 and filled up with zeros
           for each row:
             scf.for each entry of the row iter_args(sums)   // two groups of 4 bits, or one of 8
               values[16 p ..], 16 bytes, as integers in lanes of 32 bits
               4 bits: permute(levels, bytes), permute(levels, bytes >> 4), the floats -8 .. 7; or by shifts
               times the scale of the group; one multiply-add a token
           the totals of 16 rows, through the epilogue into y

What a lane multiplies is the element of the dequantized weight, so that a sum is that of floats.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.dialects.quantized_packings import Groups
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, products, stored_of
from gossamer.passes.loops.vectors import index, load_index, loop, sums_across, vector_of, zeros
from gossamer.passes.weights.few_tokens import FewTokens, TokenRows

_TOKENS = 8  # at most, that share the weights as floats
_NEAR = 32 << 10  # bytes of the tokens of a tile: what the first-level cache of any target holds
_CHAINS = 8  # sums that have to be under way at once
_WIDEST = 16  # lanes, of which an instruction looks up any other
_PERMUTE = "llvm.x86.avx512.permvar.sf.512"
_GROUP = {4: 1.2, 8: 2.6}  # cycles, by bits
_TOKEN, _ROW, _TOTALS = 1.05, 30.0, 8.0


def _storage(matrix: Matrix) -> Groups | None:
    if matrix.group_bits is None or matrix.element != "f32" or matrix.columns > Groups.WIDEST:
        return None
    return Groups(matrix.reduction, matrix.group_bits)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens]"""
    return (_tokens(matrix),) if isinstance(stored, Groups) else None


def _tokens(matrix: Matrix) -> int:
    """Of a tile: two at least, and otherwise as many as stay near."""
    fit = [n for n in (8, 4) if 4 * n * matrix.columns <= _NEAR]
    return fit[0] if fit else 2


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of t tokens: 1.2 (4 bits) or 2.6 (8 bits) + 1.05 t for each stored group, L of 16 elements at a time; 30 + 8 t a
    row; K t / L for the copy of x."""
    assert matrix.group_bits is not None
    groups, lanes = matrix.rows * matrix.columns / Groups.COLUMNS * kept_groups(matrix), matrix.lanes
    vectors = _WIDEST / lanes
    full, left = divmod(tokens, _tokens(matrix))
    tiles = [_tokens(matrix)] * full + ([1 << (left - 1).bit_length()] if left else [])
    cycles = _GROUP[matrix.group_bits]
    each = (groups * vectors * (cycles + _TOKEN * t) + (_ROW + _TOTALS * t) * matrix.rows for t in tiles)
    return sum(each) + matrix.columns / lanes * tokens


def _read(matrix: Matrix) -> float:
    """Bytes: 16 elements, a scale and a coordinate for each stored group."""
    assert matrix.group_bits is not None
    groups = matrix.rows * matrix.columns / Groups.COLUMNS * kept_groups(matrix)
    return groups * (Groups.COLUMNS * matrix.group_bits / 8 + 6)


def kept_groups(matrix: Matrix) -> float:
    """The share of groups with a nonzero."""
    if matrix.block is None or matrix.block[1] % Groups.COLUMNS:
        return 1 - (1 - matrix.density) ** Groups.COLUMNS
    return min(matrix.density / matrix.fill, 1.0)


GROUPS = Family("groups", _storage, _tile, _cycles, most=_TOKENS, read=_read)


@dataclass(frozen=True)
class LowerGroups:
    """Lower products with groups of integers to scf and vector."""

    name: ClassVar[str] = "lower-groups"

    def run(self, module: ir.Module) -> None:
        for op in products(module, GROUPS.name):
            product = _Product(op, stored_of(op, Groups))
            widths = [n for n in (8, 4, 2, 1) if n <= product.tokens]
            product.lower(module, widths, partial(_emit_rows, product))


class _Product(FewTokens):
    """Groups by rows. A copy of a token ends with a group of zeros, where the groups begin that fill up."""

    def __init__(self, op: ir.OpView, stored: Groups) -> None:
        wide = stored.COLUMNS
        columns = ir.RankedTensorType(op.operands[0].type).shape[1]
        super().__init__(op, -(-columns // wide) * wide + wide)
        if self.lanes > wide or wide % self.lanes or str(self.sum_type) != "f32":
            raise CompileError(f"groups of {wide} are no vectors of {self.lanes} {self.sum_type}")
        self.stored = stored
        # A vector of sums for each token and row of a vector, in place of their totals.
        self.workspace += self.tokens * (self.lanes - 1) * self.lanes * 4


def _emit_rows(product: _Product, count: int, operands: Operands) -> None:
    _Rows(product, count, operands).emit()


class _Rows(TokenRows):
    """Emits the body of a function that computes `count` tokens."""

    def __init__(self, product: _Product, count: int, operands: Operands) -> None:
        super().__init__(product, count, operands)
        self.stored, self.parts = product.stored, product.stored.COLUMNS // self.lanes
        self.positions, self.coordinates, self.scales, self.values = operands.weight
        self.ways = min(self.parts * self.stored.together, max(1, _CHAINS // count))
        self.integers = vector_of(self.lanes, ir.IntegerType.get_signless(32))
        if self.stored.bits == 4 and self.lanes == _WIDEST:
            levels = [float(n - 16 if n >= 8 else n) for n in range(16)]
            kind = ir.F32Type.get()
            elements = ir.DenseElementsAttr.get([ir.FloatAttr.get(kind, n) for n in levels], type=self.vec)
            self.levels = arith.constant(self.vec, elements)

    def emit(self) -> None:
        x, sums, lanes = self.copy_of_x(), self._sums(), index(self.lanes)
        with loop(self.operands.low, self.operands.high, index(1)) as groups:
            row = arith.muli(groups.induction_variable, lanes)
            with loop(row, arith.minui(arith.addi(row, lanes), index(self.product.M)), index(1)) as rows:
                m = rows.induction_variable
                for t, each in enumerate(self._row(x, m)):
                    vector.store(each, sums, [index(t), arith.subi(m, row), index(0)])
            found = [
                sums_across([vector.load(self.vec, sums, [index(t), index(r), index(0)]) for r in range(self.lanes)])
                for t in range(self.count)
            ]
            self.store(row, found)

    def _sums(self) -> ir.Value:
        """Memory for a vector of sums for each token and row of a vector."""
        type_ = ir.MemRefType.get([self.count, self.lanes, self.lanes], self.product.sum_type)
        after = self.count * self.product.padded_K * 4
        return memref.view(type_, self.operands.workspace, arith.addi(self.operands.offset, index(after)), [])

    def _row(self, x: ir.Value, m: ir.Value) -> list[ir.Value]:
        """A vector of sums for each token."""
        begin, end = (load_index(self.positions, arith.addi(m, index(i))) for i in (0, 1))
        with loop(begin, end, index(1), [zeros(self.vec)] * (self.count * self.ways)) as entries:
            scf.YieldOp(self._entry(x, entries.induction_variable, list(entries.inner_iter_args)))
        sums = list(entries.results)
        while len(sums) > self.count:
            half = len(sums) // 2
            sums = [arith.addf(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        return sums

    def _entry(self, x: ir.Value, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """The sums with the products of an entry, whose vectors take turns with the sets of sums."""
        first, together = arith.muli(p, index(self.stored.COLUMNS)), self.stored.together
        turn = 0
        for part in range(self.parts):
            places = arith.addi(first, index(part * self.lanes))
            for g, floats in enumerate(self._floats(places)):
                group = arith.addi(arith.muli(p, index(together)), index(g))
                scale = arith.bitcast(self.product.sum_type, memref.load(self.scales, [group]))
                weights = arith.mulf(floats, vector.broadcast(self.vec, scale))
                column = arith.addi(load_index(self.coordinates, group), index(part * self.lanes))
                way = turn % self.ways * self.count
                for t in range(self.count):
                    sums[way + t] = vector.fma(weights, vector.load(self.vec, x, [index(t), column]), sums[way + t])
                turn += 1
        return sums

    def _floats(self, at: ir.Value) -> list[ir.Value]:
        """The integers in the bytes from `at` on, as floats: a vector for each group of the entry."""
        data = vector.load(vector_of(self.lanes, ir.IntegerType.get_signless(8)), self.values, [at])
        if self.stored.bits == 8:
            return [arith.sitofp(self.vec, data)]
        if self.lanes == _WIDEST:  # of a lane the lowest four bits count
            low = arith.extui(self.integers, data)
            return [
                llvm.call_intrinsic(self.vec, _PERMUTE, [self.levels, bits], [], [])
                for bits in (low, arith.shrui(low, self._splat(4)))
            ]
        wide = arith.extsi(self.integers, data)
        low = arith.shrsi(arith.shli(wide, self._splat(28)), self._splat(28))
        return [arith.sitofp(self.vec, each) for each in (low, arith.shrsi(wide, self._splat(4)))]

    def _splat(self, value: int) -> ir.Value:
        attribute = ir.IntegerAttr.get(self.integers.element_type, value)
        return arith.constant(self.integers, ir.DenseElementsAttr.get_splat(self.integers, attribute))
