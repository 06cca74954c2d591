"""Rows of a dense operand that a sparse one points to, fetched before they are needed.

Nothing but the coordinates says which row is read next, so no prefetcher of a processor does it, and out-of-order execution
sees few entries ahead. Rows are fetched into the second level of caches, since the first has too few places for lines that are
on their way: on Zen 4 products with graphs whose features take many megabytes are up to twice as fast. Where a cache near the
core holds the operand anyway, the instructions would cost up to a quarter; stencils, whose rows are near, lose a twentieth.
"""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.passes.loops.vectors import byte_width, index

_NEAR = 6 << 20  # bytes of an operand, several times a second-level cache
_LINE = 64  # bytes of a line of a cache
_SECOND_LEVEL = 2  # of `memref.prefetch`


def far(buffer: ir.Value) -> ir.Value:
    """Whether a memref of two dimensions is too large to stay near the core (i1); a constant for others."""
    memory = ir.MemRefType(buffer.type)
    if memory.rank != 2:
        return arith.constant(ir.IntegerType.get_signless(1), 0)
    elements = arith.muli(memref.dim(buffer, index(0)), memref.dim(buffer, index(1)))
    return arith.cmpi(arith.CmpIPredicate.ugt, elements, index(_NEAR // byte_width(memory.element_type)))


def reach(lines: int) -> int:
    """How many entries to look ahead, where each reads so many lines: enough to hide the latency of memory."""
    return max(16, min(64, 256 // lines))


def elements_a_line(buffer: ir.Value) -> int:
    """Of a memref."""
    return _LINE // byte_width(ir.MemRefType(buffer.type).element_type)


def fetch(buffer: ir.Value, at: Sequence[ir.Value]) -> None:
    """Starts to fetch the line of an element, to be read."""
    memref.prefetch(buffer, at, False, _SECOND_LEVEL, True)
