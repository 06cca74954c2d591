"""Prefetches rows of a dense operand that the coordinates of a sparse one point to.

Only the coordinates say which row is read next, so a processor's prefetchers cannot know it, and out-of-order execution sees
only a few entries ahead. With prefetches, products with graphs whose features take many megabytes are up to twice as fast. If a
cache near the core holds the operand anyway, the instructions would cost up to a quarter of the time. Stencils, whose rows are
near each other, lose a twentieth.

A first-level cache of the usual 32 KB, as on Zen 4, has too few places for pending lines. With such a cache, whole rows are
prefetched into the second level. A larger first-level cache takes the first lines of rows some entries ahead. The processor
sees that they are read in order, and fetches the other lines. On Emerald Rapids this is 1.1 to 1.3 times as fast as whole rows
into the second level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.passes.loops.vectors import byte_width, index, loop

_NEAR = 6 << 20  # most bytes of an operand that stays near the core: several times a second-level cache
_LINE = 64  # bytes of a cache line
_BEGINNING, _SOON = 2, 8  # for the first level: most lines of a row, and how many entries ahead
_ROWS = 4  # how many rows ahead to prefetch if rows are read in order


@dataclass(frozen=True)
class Ahead:
    """How to prefetch rows: at most `lines` lines of each, `entries` entries ahead, into the cache of a `level`."""

    lines: int
    entries: int
    level: int

    @staticmethod
    def into(level: int, lines: int) -> "Ahead":
        """Returns how to prefetch if each entry reads `lines` lines: far enough ahead to hide the latency of memory."""
        return Ahead(min(lines, _BEGINNING), _SOON, 1) if level == 1 else Ahead(lines, max(16, min(64, 256 // lines)), level)

    def fetch(self, buffer: ir.Value, at: Sequence[ir.Value]) -> None:
        """Prefetches the cache line of an element, for reading."""
        memref.prefetch(buffer, at, False, 4 - self.level, True)


def fetch_row(dense: ir.Value, row: ir.Value, rows: ir.Value, columns: ir.Value, to_write: bool = False) -> None:
    """Prefetches all lines of the matrix row that comes `_ROWS` rows later, or of the last row."""
    later = arith.minui(arith.addi(row, index(_ROWS)), arith.subi(rows, index(1)))
    with loop(index(0), columns, index(max(elements_a_line(dense), 1))) as lines:
        memref.prefetch(dense, [later, lines.induction_variable], to_write, 3, True)


def far(buffer: ir.Value) -> ir.Value:
    """Whether a memref of two dimensions is too large to stay near the core (i1). A constant 0 for other ranks."""
    memory = ir.MemRefType(buffer.type)
    if memory.rank != 2:
        return arith.constant(ir.IntegerType.get_signless(1), 0)
    elements = arith.muli(memref.dim(buffer, index(0)), memref.dim(buffer, index(1)))
    return arith.cmpi(arith.CmpIPredicate.ugt, elements, index(_NEAR // byte_width(memory.element_type)))


def elements_a_line(buffer: ir.Value) -> int:
    """Returns how many elements of a memref are in a cache line."""
    return _LINE // byte_width(ir.MemRefType(buffer.type).element_type)
