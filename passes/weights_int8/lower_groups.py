"""lower-groups: lowers a `kernel.spmm` of the schedule "groups" to products of groups of integers with floats of few tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "groups", tile = [8], ...} : ... tensor<..., "groups(...)">
after    scf.parallel (%task) = ...                    // chunks of the weight's rows
           for each 8 tokens: func.call @region_rows8  // or _rows4, _rows2, _rows1 for the last tokens
         func.func private @region_rows8(...)
           copy the tokens of x into the workspace, widened to f32 and padded with zeros
           for each block of 128 rows:
             for each of its strips of 16, some rows at once, so that their sums fill 16 registers:
               scf.for each line of the strip iter_args(sums)   // an entry of each row, which has two groups
                 prefetch the line 16 lines ahead
                 its 16 bytes (4 bits) or 32 (8 bits), as integers in lanes of 32 bits
                 4 bits: permute(levels, bytes), permute(levels, bytes >> 4), the floats -8 .. 7; or by shifts
                 times the scale of the group (bf16: scales[p] << 16 or & ~65535 as a float); one multiply-add for each token
             the totals of its rows, in the order of rows, through the epilogue into y

Integers are 4 or 8 bits. A lane multiplies an element of the dequantized weight, so a sum equals that of floats. All rows of a
strip take the same number of steps, each with its own sums. So no branch is mispredicted at a row's end, and no sum waits for
another.

This is the only schedule for groups. It takes "step 1x16 50% 1x1" in benchmarks/results/amd-epyc-znver5/decode.json.
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.dialects.quantized_packings import Groups
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.prefetch import elements_a_line
from gossamer.passes.loops.product import Operands, products, stored_of
from gossamer.passes.loops.vectors import index, load_index, loop, mask_of, sums_across, vector_of, zeros
from gossamer.passes.weights.few_tokens import FewTokens, TokenRows

_TOKENS = 8  # most tokens that share the weights as floats
_NEAR = 32 << 10  # most bytes of the tokens of a tile: they fit the first-level cache of any target
_WIDEST = 16  # lanes of the vectors in which an instruction looks up any lane
_AHEAD = 16  # how many lines of a strip ahead to prefetch: in a decoder all weights come from memory
_PERMUTE = "llvm.x86.avx512.permvar.sf.512"
_GROUP = {4: 0.7, 8: 0.9}  # cycles, by bits
_TOKEN, _ROW, _TOTALS = 0.8, 3.0, 5.0  # cycles, see _cycles


def _storage(matrix: Matrix) -> Groups | None:
    if matrix.groups is None or matrix.element != "f32" or matrix.columns > Groups.WIDEST:
        return None
    return Groups.for_columns(matrix.reduction, *matrix.groups, matrix.columns)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (_tokens(matrix),) if isinstance(stored, Groups) else None


def _tokens(matrix: Matrix) -> int:
    """Returns the tokens of a tile: as many as fit the first-level cache, but at least two."""
    fit = [n for n in (8, 4) if 4 * n * matrix.columns <= _NEAR]
    return fit[0] if fit else 2


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. A tile of t tokens takes the sum of

    - 0.7 (4 bits) or 0.9 (8 bits) + 0.8 t for each vector of L elements of a stored group,
    - 3 + 5 t for each row,
    - K t / L for the copy of x.
    """
    assert matrix.groups is not None
    groups, lanes = matrix.rows * matrix.columns / Groups.COLUMNS * kept_groups(matrix), matrix.lanes
    vectors = _WIDEST / lanes
    full, left = divmod(tokens, _tokens(matrix))
    tiles = [_tokens(matrix)] * full + ([1 << (left - 1).bit_length()] if left else [])
    cycles = _GROUP[matrix.groups[0]]
    each = (groups * vectors * (cycles + _TOKEN * t) + (_ROW + _TOTALS * t) * matrix.rows for t in tiles)
    return sum(each) + matrix.columns / lanes * tokens


def _read(matrix: Matrix) -> float:
    """Returns the bytes that it reads: 16 elements, a scale and a coordinate for each stored group."""
    stored = _storage(matrix)
    assert stored is not None
    groups = matrix.rows * matrix.columns / stored.COLUMNS * kept_groups(matrix)
    return groups * (stored.COLUMNS * stored.bits + stored.scale + stored.places) / 8


def kept_groups(matrix: Matrix) -> float:
    """Returns the share of groups with a nonzero."""
    if matrix.block is None or matrix.block[1] % Groups.COLUMNS:
        return 1 - (1 - matrix.density) ** Groups.COLUMNS
    return min(matrix.density / matrix.fill, 1.0)


GROUPS = Family("groups", _storage, _tile, _cycles, most=_TOKENS, read=_read)


@dataclass(frozen=True)
class LowerGroups:
    """Lower products with groups of integers to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, GROUPS.name):
            product = _Product(op, stored_of(op, Groups))
            widths = [n for n in (8, 4, 2, 1) if n <= product.tokens]
            product.lower(module, widths, partial(_emit_rows, product))


class _Product(FewTokens):
    """A product with groups. A copy of a token ends with a group of zeros, to which padding groups point."""

    def __init__(self, op: ir.OpView, stored: Groups) -> None:
        wide = stored.COLUMNS
        columns = ir.RankedTensorType(op.operands[0].type).shape[1]
        super().__init__(op, -(-columns // wide) * wide + wide, stored.BLOCK)
        if self.lanes > wide or wide % self.lanes or str(self.sum_type) != "f32":
            raise CompileError(f"groups of {wide} are no vectors of {self.lanes} {self.sum_type}")
        self.stored = stored
        # Behind the copy of x are a vector of sums for each token and row of a strip, and the totals of a block.
        self.workspace = self.tokens * 4 * (self.padded_K + stored.ROWS * self.lanes + stored.BLOCK)


def _emit_rows(product: _Product, count: int, operands: Operands) -> None:
    _Rows(product, count, operands).emit()


class _Rows(TokenRows):
    """Emits the body of a function that computes `count` tokens."""

    def __init__(self, product: _Product, count: int, operands: Operands) -> None:
        super().__init__(product, count, operands)
        self.stored, self.parts = product.stored, product.stored.COLUMNS // self.lanes
        self.positions, self.order, self.coordinates, self.scales, self.values = operands.weight
        self.together = max(1, self.lanes // count)
        self.integers = vector_of(self.lanes, ir.IntegerType.get_signless(32))
        if self.stored.bits == 4 and self.lanes == _WIDEST:
            levels = [float(n - 16 if n >= 8 else n) for n in range(16)]
            kind = ir.F32Type.get()
            elements = ir.DenseElementsAttr.get([ir.FloatAttr.get(kind, n) for n in levels], type=self.vec)
            self.levels = arith.constant(self.vec, elements)

    def emit(self) -> None:
        product, height, block = self.product, index(self.stored.ROWS), index(self.stored.BLOCK)
        x, after = self.copy_of_x(), self.count * product.padded_K * 4
        sums = self._memory(after, [self.count, self.stored.ROWS, self.lanes])
        totals = self._memory(after + self.count * self.stored.ROWS * self.lanes * 4, [self.count, self.stored.BLOCK])
        with loop(self.operands.low, self.operands.high, index(1)) as blocks:
            begin = arith.muli(blocks.induction_variable, block)
            end = arith.minui(arith.addi(begin, block), index(product.M))
            with loop(begin, end, height) as strips:
                first = strips.induction_variable
                self._strip(x, sums, arith.divui(first, height))
                self._add_up(sums, totals, arith.subi(first, begin))
            with loop(begin, end, index(self.lanes)) as rows:
                row = rows.induction_variable
                self.store(row, [self._in_order(totals, t, row) for t in range(self.count)])

    def _memory(self, at: int, shape: list[int]) -> ir.Value:
        type_ = ir.MemRefType.get(shape, self.product.sum_type)
        return memref.view(type_, self.operands.workspace, arith.addi(self.operands.offset, index(at)), [])

    def _strip(self, x: ir.Value, sums: ir.Value, strip: ir.Value) -> None:
        """Computes a vector of sums for each token and row of a strip."""
        begin, end = (load_index(self.positions, arith.addi(strip, index(i))) for i in (0, 1))
        with loop(index(0), index(self.stored.ROWS), index(self.together)) as parts:
            first = parts.induction_variable
            with loop(begin, end, index(1), [zeros(self.vec)] * (self.together * self.count)) as lines:
                entry = arith.addi(arith.muli(lines.induction_variable, index(self.stored.ROWS)), first)
                self._fetch(arith.addi(entry, index(_AHEAD * self.stored.ROWS)))
                found = [
                    self._entry(x, arith.addi(entry, index(r)), list(lines.inner_iter_args[r :: self.together]))
                    for r in range(self.together)
                ]
                scf.YieldOp([found[r][t] for t in range(self.count) for r in range(self.together)])
            for i, each in enumerate(lines.results):
                t, r = divmod(i, self.together)
                vector.store(each, sums, [index(t), arith.addi(first, index(r)), index(0)])

    def _fetch(self, p: ir.Value) -> None:
        """Prefetches entries of the rows that are computed at once, maybe behind the last one."""
        stored = self.stored
        entry = stored.TOGETHER * stored.bits * stored.COLUMNS // 8
        each = ((self.values, entry), (self.scales, stored.TOGETHER * stored.scale // 32), (self.coordinates, stored.TOGETHER))
        for memory, elements in each:
            for at in range(0, self.together * elements, elements_a_line(memory)):
                memref.prefetch(memory, [arith.addi(arith.muli(p, index(elements)), index(at))], False, 2, True)

    def _entry(self, x: ir.Value, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums of a row, one for each token, plus the products of an entry."""
        scales = self._scales(p)
        for part in range(self.parts):
            for g, floats in enumerate(self._floats(p, part * self.lanes)):
                group = arith.addi(arith.muli(p, index(self.stored.TOGETHER)), index(g))
                weights = arith.mulf(floats, scales[g])
                number = load_index(self.coordinates, group)
                column = arith.addi(arith.muli(number, index(self.stored.COLUMNS)), index(part * self.lanes))
                sums = [vector.fma(weights, vector.load(self.vec, x, [index(t), column]), sums[t]) for t in range(self.count)]
        return sums

    def _scales(self, p: ir.Value) -> list[ir.Value]:
        """Returns the scale of each group of an entry, in all lanes."""
        if self.stored.scale == 32:
            first = arith.muli(p, index(self.stored.TOGETHER))
            bits = [self._word(arith.addi(first, index(g))) for g in range(self.stored.TOGETHER)]
        else:
            both = self._word(p)
            bits = [arith.shli(both, self._splat(16)), arith.andi(both, self._splat(-1 << 16))]
        return [arith.bitcast(self.vec, each) for each in bits]

    def _word(self, at: ir.Value) -> ir.Value:
        return vector.broadcast(self.integers, memref.load(self.scales, [at]))

    def _floats(self, p: ir.Value, part: int) -> list[ir.Value]:
        """Returns a vector of floats for each group of an entry: its integers from the `part`-th on."""
        first = arith.addi(arith.muli(p, index(2 * self.stored.bits * self.stored.COLUMNS // 8)), index(part))
        if self.stored.bits == 8:
            places = first, arith.addi(first, index(self.stored.COLUMNS))
            return [arith.sitofp(self.vec, self._bytes(self.values, at)) for at in places]
        data = self._bytes(self.values, first)
        if self.lanes == _WIDEST:  # the instruction reads the lowest four bits of a lane
            low = arith.extui(self.integers, data)
            return [
                llvm.call_intrinsic(self.vec, _PERMUTE, [self.levels, bits], [], [])
                for bits in (low, arith.shrui(low, self._splat(4)))
            ]
        wide = arith.extsi(self.integers, data)
        low = arith.shrsi(arith.shli(wide, self._splat(28)), self._splat(28))
        return [arith.sitofp(self.vec, each) for each in (low, arith.shrsi(wide, self._splat(4)))]

    def _add_up(self, sums: ir.Value, totals: ir.Value, place: ir.Value) -> None:
        """Adds up the totals of a strip, which begins at this place of its block."""
        for t in range(self.count):
            for r in range(0, self.stored.ROWS, self.lanes):
                each = [vector.load(self.vec, sums, [index(t), index(r + i), index(0)]) for i in range(self.lanes)]
                vector.store(sums_across(each), totals, [index(t), arith.addi(place, index(r))])

    def _in_order(self, totals: ir.Value, token: int, row: ir.Value) -> ir.Value:
        """Returns the totals of a vector of rows of a block, in the order of rows."""
        places = arith.extui(self.integers, self._bytes(self.order, row))
        everywhere = mask_of(self.lanes, index(self.lanes))
        return vector.gather(self.vec, totals, [index(token), index(0)], places, everywhere, zeros(self.vec))

    def _bytes(self, memory: ir.Value, at: ir.Value) -> ir.Value:
        return vector.load(vector_of(self.lanes, ir.IntegerType.get_signless(8)), memory, [at])

    def _splat(self, value: int) -> ir.Value:
        attribute = ir.IntegerAttr.get(self.integers.element_type, value)
        return arith.constant(self.integers, ir.DenseElementsAttr.get_splat(self.integers, attribute))
