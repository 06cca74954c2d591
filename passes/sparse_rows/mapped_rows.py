"""Walks over the rows of a matrix with a bit map, a vector at a time, for AVX-512. A word of the map has a bit for each lane.

for each row r, for each word of its map
  bits = map[r, word]; the caller's step                    // on d[r, 16 word ...] and the values from `place` on
  place += popcount(bits)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, math, memref, scf, vector

from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, vector_of, zeros

LINE = 64
"""Bytes of a vector, and of a cache line."""

_AHEAD = 8 << 10  # how many bytes ahead lines are prefetched


@dataclass(frozen=True)
class Line:
    """A vector of a row.

    bits, mask  its word of the map, as an integer and as a vector
    count       number of bits that are set
    place       place of its first value
    carried     the values that the previous step has returned
    """

    row: ir.Value
    column: ir.Value
    bits: ir.Value
    mask: ir.Value
    count: ir.Value
    place: ir.Value
    carried: list[ir.Value]


Step = Callable[[Line], list[ir.Value]]
"""Emits the work on a line. Returns the values that the next step gets as `carried`."""


class MappedRows:
    """The rows of a dense matrix, with the place of each row's first value (`positions`), and the map."""

    def __init__(self, positions: ir.Value, map: ir.Value, dense: ir.Value) -> None:
        self.positions, self.map, self.dense = positions, map, dense
        element = ir.MemRefType(dense.type).element_type
        self.lanes = LINE // byte_width(element)
        self.vec = vector_of(self.lanes, element)
        self._name = f"v{self.lanes}f{8 * byte_width(element)}"

    def walk(self, rows: tuple[ir.Value, ir.Value], step: Step, carried: Sequence[ir.Value] = ()) -> list[ir.Value]:
        """Emits a step for each vector of each row. Returns the values of the last step."""
        with loop(*rows, index(1), [load_index(self.positions, rows[0]), *carried]) as each:
            scf.YieldOp(self.row(each.induction_variable, step, list(each.inner_iter_args)))
        return list(each.results)[1:]

    def row(self, row: ir.Value, step: Step, carried: Sequence[ir.Value]) -> list[ir.Value]:
        """Emits a step for each vector of a row. The first of the `carried` values is the place of the row's first value."""
        with loop(index(0), memref.dim(self.map, index(1)), index(1), list(carried)) as each:
            place, *more = each.inner_iter_args
            bits = memref.load(self.map, [row, each.induction_variable])
            count = arith.index_castui(ir.IndexType.get(), math.ctpop(bits))
            column = arith.muli(each.induction_variable, index(self.lanes))
            more = step(Line(row, column, bits, self._mask(bits), count, place, more))
            scf.YieldOp([arith.addi(place, count), *more])
        return list(each.results)

    def _mask(self, bits: ir.Value) -> ir.Value:
        lanes = vector_of(self.lanes, ir.IntegerType.get_signless(1))
        return vector.bitcast(lanes, vector.broadcast(vector_of(1, bits.type), bits))

    def expanded(self, line: Line, values: ir.Value, at: list[ir.Value]) -> ir.Value:
        """Returns a vector with the values from a place on in the lanes whose bit is set.

        A separate instruction loads them, because an expansion from memory is a hundred times slower on AMD's Zen 4.
        """
        packed = vector.maskedload(self.vec, values, at, mask_of(self.lanes, line.count), zeros(self.vec))
        name = f"llvm.x86.avx512.mask.expand.{self._name}"
        return llvm.call_intrinsic(self.vec, name, [packed, zeros(self.vec), line.mask], [], [])

    def compress(self, line: Line, values: ir.Value, at: list[ir.Value]) -> ir.Value:
        """Stores the elements of a line whose bit is set, from a place on. Returns the whole line."""
        given = vector.load(self.vec, self.dense, [line.row, line.column])
        name = f"llvm.x86.avx512.mask.compress.{self._name}"
        packed = llvm.call_intrinsic(self.vec, name, [given, zeros(self.vec), line.mask], [], [])
        vector.maskedstore(values, at, mask_of(self.lanes, line.count), packed)
        return given

    def fetch(self, line: Line, to_write: bool) -> None:
        """Prefetches a later line. Prefetching past the end does no harm."""
        at = arith.addi(line.column, index(_AHEAD // byte_width(self.vec.element_type)))
        memref.prefetch(self.dense, [line.row, at], to_write, 3, True)
