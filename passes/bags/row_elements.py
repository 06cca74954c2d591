"""The elements of a table's rows, as vectors of what is computed with: floats, or integers of few bits with a scale a row."""

from torch_mlir import ir
from torch_mlir.dialects import arith

from gossamer.dialects.bags import Field
from gossamer.passes.bags.table_lines import Line, Piece, lines_of
from gossamer.passes.loops.vectors import byte_width, vector_of, widened


class RowElements:
    """Those of tables of so many columns.

    stored   elements of a row in memory: half as many bytes as columns for 4 bits, rounded up
    wide     the vectors of sums, narrow those of results
    """

    def __init__(self, element: str, columns: int, bits: int, wide_results: bool) -> None:
        self.columns, self.packed = columns, element == "i4"
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
        """Of a row."""
        return -(-self.columns // self.lanes)

    def memory(self, line: Line, rows: ir.Value) -> ir.Value:
        """The table."""
        return line.memory(Field.TABLE, self.element, rows, self.stored)

    def scales(self, line: Line, rows: ir.Value) -> ir.Value | None:
        """What rows of integers are multiplied with."""
        return line.memory(Field.SCALES, ir.F32Type.get(), rows) if self.integers else None

    def results(self, tile: list[Piece]) -> list[Piece]:
        """The columns that some vectors of a stored row stand for."""
        if not self.packed:
            return tile
        later = [
            Piece(self.stored + each.at, min(each.count, self.columns - self.stored - each.at), each.lanes) for each in tile
        ]
        return [*tile, *(each for each in later if each.count > 0)]

    def read(self, memory: ir.Value, row: ir.Value, tile: list[Piece]) -> list[ir.Value]:
        """Vectors of a row, wide."""
        loaded = [each.load(memory, row, self.element) for each in tile]
        if not self.integers:
            return [widened(each, self.wide) for each in loaded]
        if self.packed:
            four = _splat(ir.VectorType(loaded[0].type), 4)
            low = [arith.shrsi(arith.shli(each, four), four) for each in loaded]
            high = [arith.shrsi(each, four) for each in loaded]
            loaded = [*low, *high[: len(self.results(tile)) - len(tile)]]
        return [arith.sitofp(self.wide, each) for each in loaded]


def _splat(type_: ir.VectorType, value: int) -> ir.Value:
    return arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(type_.element_type, value)))
