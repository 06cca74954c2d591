"""Reads the lines that describe tables (see dialects/bags.py), and cuts their rows into vectors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf, vector

from gossamer.passes.loops.llvm_values import memory_at
from gossamer.passes.loops.vectors import byte_width, index, mask_of, narrowed, vector_of, widened, zeros

_TILE = 8  # vectors of results at once: half of the registers of AVX2
_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Line:
    """The line of one table."""

    lines: ir.Value
    table: ir.Value

    def number(self, field: IntEnum) -> ir.Value:
        """Returns a number of the line as an index."""
        return signed_index(self.lines, self.table, index(int(field)))

    def there(self, field: IntEnum) -> ir.Value:
        """Whether an address is not 0 (i1)."""
        return arith.cmpi(arith.CmpIPredicate.ne, self.number(field), index(0))

    def memory(self, field: IntEnum, element: ir.Type, rows: ir.Value, columns: int | None = None) -> ir.Value:
        """Returns the memref [rows], or [rows, columns], at an address."""
        word = memref.load(self.lines, [self.table, index(int(field))])
        address = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), word)
        shape = [ir.ShapedType.get_dynamic_size(), *([] if columns is None else [columns])]
        return memory_at(address, ir.MemRefType.get(shape, element), [arith.index_cast(ir.IntegerType.get_signless(64), rows)])


@dataclass(frozen=True)
class Piece:
    """A vector of the columns from `at` on, of which `count` exist."""

    at: int
    count: int
    lanes: int

    def load(self, buffer: ir.Value, row: ir.Value, element: ir.Type) -> ir.Value:
        """Loads the vector from a row of a matrix, with 0 in the lanes beyond."""
        type_ = vector_of(self.lanes, element)
        if self.count == self.lanes:
            return vector.load(type_, buffer, [row, index(self.at)])
        return vector.maskedload(type_, buffer, [row, index(self.at)], mask_of(self.lanes, index(self.count)), zeros(type_))

    def store(self, value: ir.Value, buffer: ir.Value, row: ir.Value) -> None:
        """Stores the vector to a row of a matrix."""
        if self.count == self.lanes:
            vector.store(value, buffer, [row, index(self.at)])
        else:
            vector.maskedstore(buffer, [row, index(self.at)], mask_of(self.lanes, index(self.count)), value)


def tiles_of(columns: int, lanes: int) -> list[list[Piece]]:
    """Returns the vectors of a row, in groups whose sums stay in registers."""
    pieces = [Piece(at, min(lanes, columns - at), lanes) for at in range(0, columns, lanes)]
    return [pieces[first : first + _TILE] for first in range(0, len(pieces), _TILE)]


def fetch_row(buffer: ir.Value, row: ir.Value, first: int, last: int, level: int) -> None:
    """Prefetches the columns [first, last) of a row of a matrix into the cache of a level, for reading."""
    step = _LINE // byte_width(ir.MemRefType(buffer.type).element_type)
    for column in range(first, last, step):
        memref.prefetch(buffer, [row, index(column)], False, 4 - level, True)


def lines_of(columns: int, width: int) -> int:
    """Returns the number of cache lines for `columns` columns of `width` bytes."""
    return -(-columns * width // _LINE)


def signed_index(buffer: ir.Value, *at: ir.Value) -> ir.Value:
    """Loads buffer[at], a signed integer, as an index."""
    return arith.index_cast(ir.IndexType.get(), memref.load(buffer, list(at)))


def below(value: ir.Value, bound: ir.Value) -> ir.Value:
    """Whether 0 <= value < bound (i1)."""
    return arith.cmpi(arith.CmpIPredicate.ult, value, bound)


def word(number: ir.Value) -> ir.Value:
    """Converts an index to i64."""
    return arith.index_cast(ir.IntegerType.get_signless(64), number)


def cast(value: ir.Value, to: ir.Type) -> ir.Value:
    """Converts a float to another width."""
    return narrowed(value, to) if ir.FloatType(value.type).width > ir.FloatType(to).width else widened(value, to)


@contextmanager
def only_if(condition: ir.Value) -> Iterator[None]:
    """Makes an scf.if, with the insertion point inside."""
    with ir.InsertionPoint(scf.IfOp(condition).then_block):
        yield
        scf.YieldOp([])


@contextmanager
def chosen(condition: ir.Value, types: Sequence[ir.Type] = ()) -> Iterator[tuple[scf.IfOp, ir.Block, ir.Block]]:
    """Makes an scf.if. Yields it and its two blocks; the caller ends each block with an scf.yield."""
    choice = scf.IfOp(condition, list(types), has_else=True)
    yield choice, choice.then_block, choice.else_block
