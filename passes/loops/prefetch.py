"""Rows of a dense operand that a sparse one points to, fetched before they are needed.

Nothing but the coordinates says which row is read next, so no prefetcher of a processor does it, and out-of-order execution
sees few entries ahead. Products with graphs whose features take many megabytes are up to twice as fast. Where a cache near the
core holds the operand anyway, the instructions would cost up to a quarter; stencils, whose rows are near, lose a twentieth.

Where the first level is of the usual 32 KB, all of a row is fetched into the second level, as on Zen 4: the first has too few
places for lines that are on their way. A larger one takes the beginnings of rows some entries ahead; the processor, which sees
them read in order, fetches the rest: on Emerald Rapids that is 1.1 to 1.3 times as fast as whole rows into the second level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.passes.loops.vectors import byte_width, index, loop

_NEAR = 6 << 20  # bytes of an operand, several times a second-level cache
_LINE = 64  # bytes of a line of a cache
_BEGINNING, _SOON = 2, 8  # lines of a row that the first level takes, and entries ahead
_ROWS = 4  # how far ahead rows are fetched that are walked one after the other


@dataclass(frozen=True)
class Ahead:
    """What is fetched of a row: so many lines at most, so many `entries` ahead, into caches of a `level`."""

    lines: int
    entries: int
    level: int

    @staticmethod
    def into(level: int, lines: int) -> "Ahead":
        """Where each entry reads so many lines: far enough ahead to hide the latency of memory."""
        return Ahead(min(lines, _BEGINNING), _SOON, 1) if level == 1 else Ahead(lines, max(16, min(64, 256 // lines)), level)

    def fetch(self, buffer: ir.Value, at: Sequence[ir.Value]) -> None:
        """Starts to fetch the line of an element, to be read."""
        memref.prefetch(buffer, at, False, 4 - self.level, True)


def fetch_row(dense: ir.Value, row: ir.Value, rows: ir.Value, columns: ir.Value, to_write: bool = False) -> None:
    """Starts to fetch all lines of a row of a matrix that comes some rows later, or of the last one."""
    later = arith.minui(arith.addi(row, index(_ROWS)), arith.subi(rows, index(1)))
    with loop(index(0), columns, index(max(elements_a_line(dense), 1))) as lines:
        memref.prefetch(dense, [later, lines.induction_variable], to_write, 3, True)


def far(buffer: ir.Value) -> ir.Value:
    """Whether a memref of two dimensions is too large to stay near the core (i1); a constant for others."""
    memory = ir.MemRefType(buffer.type)
    if memory.rank != 2:
        return arith.constant(ir.IntegerType.get_signless(1), 0)
    elements = arith.muli(memref.dim(buffer, index(0)), memref.dim(buffer, index(1)))
    return arith.cmpi(arith.CmpIPredicate.ugt, elements, index(_NEAR // byte_width(memory.element_type)))


def elements_a_line(buffer: ir.Value) -> int:
    """Of a memref."""
    return _LINE // byte_width(ir.MemRefType(buffer.type).element_type)
