"""The storages of experts' weights: how a few columns of a row are read, and multiplied with those of tokens.

Floats        a vector of f32, or of bf16 or f16 widened to f32, times one of x
Pairs         a vector of bf16, twice as long, times one of x, by AVX512-BF16's dot products of pairs
IntegerPairs  integers of 8 bits whose rows have one scale, converted to bf16 exactly, then like Pairs
Integers      integers of 8 bits as floats, times the scale of their group, times a vector of x (f32)
HalfBytes     the same for 4 bits: a vector of bytes is one of the even columns and one of the odd ones, and so is x
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, vector, x86

from gossamer.passes.loops.vectors import byte_width, index, interleaved, mask_of, vector_of, widened, zeros

_PERMUTE = "llvm.x86.avx512.permvar.sf.512"


@dataclass(frozen=True)
class Floats:
    """Rows of floats in a line of memory. Sums are vectors of f32.

    lanes    lanes of a vector of sums
    element  element type of the weight
    group    columns that share a scale; 0 if a row has one scale, or none
    """

    lanes: int
    element: ir.Type
    group: int = 0

    @property
    def columns(self) -> int:
        """Number of columns of a row that a step multiplies."""
        return self.lanes

    @property
    def in_line(self) -> int:
        """Number of columns of a row in a cache line."""
        return 64 * self.columns // (self.lanes * self.pair * byte_width(self.element))

    def place(self, column: ir.Value) -> ir.Value:
        """Returns the place of a column in a row."""
        return column

    @property
    def scaled(self) -> bool:
        """Whether each row has a scale for its sums."""
        return isinstance(self.element, ir.IntegerType) and not self.group

    @property
    def vec(self) -> ir.VectorType:
        """The type of a sum."""
        return vector_of(self.lanes, ir.F32Type.get())

    def x(self, memory: ir.Value, row: ir.Value, column: ir.Value, left: ir.Value | None) -> list[ir.Value]:
        """Reads the columns of a token that a step multiplies, of which only `left` exist if it is given."""
        return [widened(self._read(memory, [row, column], self.lanes, left), self.vec)]

    def weights(self, memory: ir.Value, at: ir.Value, scale: ir.Value | None, left: ir.Value | None) -> list[ir.Value]:
        """Reads the columns of a weight's row from place `at` on, of which only `left` exist if it is given."""
        return [widened(self._read(memory, [at], self.lanes, left), self.vec)]

    def multiplied(self, weights: Sequence[ir.Value], x: Sequence[ir.Value], total: ir.Value) -> ir.Value:
        """Returns total plus the products."""
        for a, b in zip(weights, x, strict=True):
            total = vector.fma(a, b, total)
        return total

    @property
    def pair(self) -> int:
        """Number of columns of a row that one lane multiplies."""
        return 1

    def spread(self, memory: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
        """Returns a column of a token, or a pair of columns, in all lanes."""
        element = memref.load(memory, [row, column])
        return vector.broadcast(self.vec, widened(element, ir.F32Type.get()))

    def paired(self, lines: Sequence[ir.Value]) -> list[ir.Value]:
        """Interleaves vectors of `pair` rows, so that each lane has one column of all of them."""
        return list(lines)

    def word(self, value: ir.Value) -> ir.Value:
        """Converts a vector to one of f32 with the same bits, for panels."""
        return value

    def of_word(self, value: ir.Value) -> ir.Value:
        """Converts a vector of f32 from a panel back."""
        return value

    def _read(self, memory: ir.Value, at: list[ir.Value], count: int, left: ir.Value | None) -> ir.Value:
        kind = vector_of(count, ir.MemRefType(memory.type).element_type)
        if left is None:
            return vector.load(kind, memory, at)
        return vector.maskedload(kind, memory, at, mask_of(count, left), zeros(kind))


@dataclass(frozen=True)
class Pairs(Floats):
    """Rows of bf16, and tokens of bf16."""

    @property
    def columns(self) -> int:
        return 2 * self.lanes

    def x(self, memory: ir.Value, row: ir.Value, column: ir.Value, left: ir.Value | None) -> list[ir.Value]:
        return [self._read(memory, [row, column], self.columns, left)]

    def weights(self, memory: ir.Value, at: ir.Value, scale: ir.Value | None, left: ir.Value | None) -> list[ir.Value]:
        return [self._read(memory, [at], self.columns, left)]

    @property
    def pair(self) -> int:
        return 2

    def spread(self, memory: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
        element = ir.MemRefType(memory.type).element_type
        word = vector.bitcast(vector_of(1, ir.F32Type.get()), vector.load(vector_of(2, element), memory, [row, column]))
        return self.of_word(vector.broadcast(self.vec, vector.extract(word, [], [0])))

    def paired(self, lines: Sequence[ir.Value]) -> list[ir.Value]:
        return list(interleaved(lines[0], lines[1], 1))

    def word(self, value: ir.Value) -> ir.Value:
        return vector.bitcast(self.vec, value)

    def of_word(self, value: ir.Value) -> ir.Value:
        return vector.bitcast(vector_of(self.columns, ir.BF16Type.get()), value)

    def multiplied(self, weights: Sequence[ir.Value], x: Sequence[ir.Value], total: ir.Value) -> ir.Value:
        return x86.DotBF16Op(total, weights[0], x[0]).result


@dataclass(frozen=True)
class IntegerPairs(Pairs):
    """Rows of bytes that have one scale each, and tokens of bf16. bf16 represents all bytes exactly."""

    def weights(self, memory: ir.Value, at: ir.Value, scale: ir.Value | None, left: ir.Value | None) -> list[ir.Value]:
        wide = arith.extsi(vector_of(self.columns, _i32()), self._read(memory, [at], self.columns, left))
        floats = arith.sitofp(vector_of(self.columns, ir.F32Type.get()), wide)
        return [arith.truncf(vector_of(self.columns, ir.BF16Type.get()), floats)]


@dataclass(frozen=True)
class Integers(Floats):
    """Rows of bytes."""

    def weights(self, memory: ir.Value, at: ir.Value, scale: ir.Value | None, left: ir.Value | None) -> list[ir.Value]:
        wide = arith.extsi(vector_of(self.lanes, _i32()), self._read(memory, [at], self.lanes, left))
        return [self._scaled(arith.sitofp(self.vec, wide), scale)]

    def _scaled(self, floats: ir.Value, scale: ir.Value | None) -> ir.Value:
        return floats if scale is None else arith.mulf(floats, scale)


@dataclass(frozen=True)
class HalfBytes(Integers):
    """Rows of bytes with two integers each. Of each 2 `lanes` columns, x has the even ones first, then the odd ones."""

    @property
    def columns(self) -> int:
        return 2 * self.lanes

    def place(self, column: ir.Value) -> ir.Value:
        return arith.shrui(column, index(1))

    def x(self, memory: ir.Value, row: ir.Value, column: ir.Value, left: ir.Value | None) -> list[ir.Value]:
        return [
            widened(self._read(memory, [row, arith.addi(column, index(half * self.lanes))], self.lanes, None), self.vec)
            for half in (0, 1)
        ]

    def weights(self, memory: ir.Value, at: ir.Value, scale: ir.Value | None, left: ir.Value | None) -> list[ir.Value]:
        kind, data = vector_of(self.lanes, _i32()), self._read(memory, [at], self.lanes, None)
        if self.lanes == 16:  # the instruction reads the lowest four bits of a lane
            low = arith.extui(kind, data)
            levels = self._levels()
            found = [
                llvm.call_intrinsic(self.vec, _PERMUTE, [levels, bits], [], [])
                for bits in (low, arith.shrui(low, _splat(kind, 4)))
            ]
        else:
            wide = arith.extsi(kind, data)
            low = arith.shrsi(arith.shli(wide, _splat(kind, 28)), _splat(kind, 28))
            found = [arith.sitofp(self.vec, each) for each in (low, arith.shrsi(wide, _splat(kind, 4)))]
        return [self._scaled(each, scale) for each in found]

    def _levels(self) -> ir.Value:
        levels = [float(n - 16 if n >= 8 else n) for n in range(16)]
        elements = ir.DenseElementsAttr.get([ir.FloatAttr.get(ir.F32Type.get(), n) for n in levels], type=self.vec)
        return arith.constant(self.vec, elements)


def stored_as(op: ir.Operation, bits: int) -> Floats:
    """Returns the storage of an op's weight, for vectors of `bits` bits."""
    element = ir.RankedTensorType(op.opview.weight.type).element_type
    lanes, number = bits // 32, {name: ir.IntegerAttr(op.attributes[name]).value for name in ("dots", "four", "group")}
    if isinstance(element, ir.IntegerType) and number["dots"]:
        return IntegerPairs(lanes, element)
    if isinstance(element, ir.IntegerType):
        return (HalfBytes if number["four"] else Integers)(lanes, element, number["group"])
    return (Pairs if number["dots"] else Floats)(lanes, element)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _splat(kind: ir.VectorType, value: int) -> ir.Value:
    return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(_i32(), value)))
