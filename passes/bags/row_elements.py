"""Reads the elements of a table's rows as vectors of floats: from floats, or from integers with a scale for each row."""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, vector

from gossamer.dialects.bags import Field
from gossamer.passes.bags.table_lines import Line, Piece, fetch_row, lines_of, signed_index
from gossamer.passes.loops.vectors import byte_width, index, vector_of, widened, zeros


class RowElements:
    """The elements of tables of `columns` columns.

    stored   elements of a row in memory; for 4 bits, bytes: half as many as columns, rounded up
    wide     type of the vectors of sums
    narrow   type of the vectors of results
    level    level of the cache into which rows are prefetched
    """

    def __init__(self, element: str, columns: int, bits: int, wide_results: bool, level: int) -> None:
        self.columns, self.packed, self.level = columns, element == "i4", level
        self.element = ir.IntegerType.get_signless(8) if self.packed else ir.Type.parse(element)
        self.integers = isinstance(self.element, ir.IntegerType)
        self.stored = -(-columns // 2) if self.packed else columns
        wide = self.element if element == "f64" else ir.F32Type.get()
        self.lanes = bits // 8 // byte_width(wide)
        self.wide = vector_of(self.lanes, wide)
        self.narrow = vector_of(self.lanes, wide if self.integers or wide_results else self.element)
        self.row_bytes = self.stored * byte_width(self.element)
        self.cache_lines = lines_of(self.stored, byte_width(self.element))

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return -(-self.columns // self.lanes)

    @staticmethod
    def of(element: str, columns: int, bits: int, wide_results: bool, level: int) -> "RowElements":
        """Returns the elements of tables of an element type (see dialects/bags.py)."""
        if element == "nonzeros":
            return Nonzeros("f32", columns, bits, True, level)
        return RowElements(element, columns, bits, wide_results, level)

    def memory(self, line: Line, rows: ir.Value) -> Any:
        """Returns the memory of the table."""
        return line.memory(Field.TABLE, self.element, rows, self.stored)

    def fetch(self, memory: Any, row: ir.Value, first: int, last: int) -> None:
        """Prefetches the stored columns [first, last) of a row."""
        fetch_row(memory, row, first, last, self.level)

    def scales(self, line: Line, rows: ir.Value) -> ir.Value | None:
        """Returns the scales of rows of integers; None for floats."""
        return line.memory(Field.SCALES, ir.F32Type.get(), rows) if self.integers else None

    def results(self, tile: list[Piece]) -> list[Piece]:
        """Returns the columns of the result for some vectors of a stored row."""
        if not self.packed:
            return tile
        later = [
            Piece(self.stored + each.at, min(each.count, self.columns - self.stored - each.at), each.lanes) for each in tile
        ]
        return [*tile, *(each for each in later if each.count > 0)]

    def read(self, memory: Any, row: ir.Value, tile: list[Piece]) -> list[ir.Value]:
        """Reads vectors of a row, as wide ones."""
        loaded = [each.load(memory, row, self.element) for each in tile]
        if not self.integers:
            return [widened(each, self.wide) for each in loaded]
        if self.packed:
            four = _splat(ir.VectorType(loaded[0].type), 4)
            low = [arith.shrsi(arith.shli(each, four), four) for each in loaded]
            high = [arith.shrsi(each, four) for each in loaded]
            loaded = [*low, *high[: len(self.results(tile)) - len(tile)]]
        return [arith.sitofp(self.wide, each) for each in loaded]


class Nonzeros(RowElements):
    """The elements of tables that store a bit for each column, and the nonzeros of their rows, row after row."""

    def memory(self, line: Line, rows: ir.Value) -> Any:
        """Returns the memory of nonzeros, of bits, and of the first nonzero of each row."""
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        return (
            line.memory(Field.TABLE, self.element, rows),
            line.memory(Field.BITS, i8, rows, 2 * -(-self.columns // 16)),
            line.memory(Field.STARTS, i32, rows),
        )

    def fetch(self, memory: Any, row: ir.Value, first: int, last: int) -> None:
        """Prefetches the bits and two lines of nonzeros, which are enough for more than half of all rows of 64 columns."""
        nonzeros, bits, starts = memory
        start = signed_index(starts, row)
        memref.prefetch(bits, [row, index(0)], False, 4 - self.level, True)
        for further in (0, 16):
            memref.prefetch(nonzeros, [arith.addi(start, index(further))], False, 4 - self.level, True)

    def read(self, memory: Any, row: ir.Value, tile: list[Piece]) -> list[ir.Value]:
        """Reads vectors of a row: the nonzeros, in order, in the lanes whose bits are set, and 0 in others."""
        nonzeros, bits, starts = memory
        place, values = signed_index(starts, row), []
        for at in range(0, tile[-1].at + 1, self.lanes):
            held = vector.load(vector_of(self.lanes // 8, ir.IntegerType.get_signless(8)), bits, [row, index(at // 8)])
            if at >= tile[0].at:
                mask = vector.bitcast(vector_of(self.lanes, ir.IntegerType.get_signless(1)), held)
                values.append(vector.expandload(self.wide, nonzeros, [place], mask, zeros(self.wide)))
            whole = vector.bitcast(vector_of(1, ir.IntegerType.get_signless(self.lanes)), held)
            place = arith.addi(place, arith.index_castui(ir.IndexType.get(), math.ctpop(vector.extract(whole, [], [0]))))
        return values


def _splat(type_: ir.VectorType, value: int) -> ir.Value:
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(type_.element_type, value)))
