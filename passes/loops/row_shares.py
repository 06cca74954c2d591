"""Divides the rows of a CSR matrix into parts of equal work for threads, by bisection in its positions."""

from torch_mlir import ir
from torch_mlir.dialects import arith, scf

from gossamer.passes.loops.vectors import index, load_index

_SMALL = 1 << 13  # vectors of multiply-adds that one thread does in the time that a team needs to synchronise


def parts_of(entries: ir.Value, vectors: ir.Value, threads: ir.Value) -> ir.Value:
    """Returns the number of parts: one for each thread, or a single one if there is little work.

    Each of `entries` entries takes `vectors` vectors of multiply-adds.
    """
    small = arith.cmpi(arith.CmpIPredicate.ult, arith.muli(entries, vectors), index(_SMALL))
    return arith.select(small, index(1), threads)


def share_of(total: ir.Value, part: ir.Value, parts: ir.Value) -> ir.Value:
    """Returns total * part / parts."""
    return arith.divui(arith.muli(part, total), parts)


def ends_of(total: ir.Value, part: ir.Value, parts: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the begin and end of a part of `total`."""
    return share_of(total, part, parts), share_of(total, arith.addi(part, index(1)), parts)


def rows_of(
    positions: ir.Value, rows: ir.Value, entries: ir.Value, part: ir.Value, parts: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns the rows [low, high) of a part of a CSR matrix. A row counts as much as an entry."""
    ends = ends_of(arith.addi(entries, rows), part, parts)
    low, high = (first_row(positions, rows, end, rows_count=True) for end in ends)
    return low, high


def first_row(positions: ir.Value, rows: ir.Value, begun: ir.Value, *, rows_count: bool) -> ir.Value:
    """Returns the first row with positions[row] >= begun, or `rows`, by bisection.

    If `rows_count`, the condition is positions[row] + row >= begun: a row itself costs as much as an entry.
    """
    kinds = [ir.IndexType.get()] * 2
    search = scf.WhileOp(kinds, [index(0), rows])
    location = search.operation.location
    with ir.InsertionPoint(ir.Block.create_at_start(search.before, kinds, [location] * 2)) as point:
        low, high = point.block.arguments
        scf.ConditionOp(arith.cmpi(arith.CmpIPredicate.ult, low, high), [low, high])
    with ir.InsertionPoint(ir.Block.create_at_start(search.after, kinds, [location] * 2)) as point:
        low, high = point.block.arguments
        middle = arith.shrui(arith.addi(low, high), index(1))
        before = load_index(positions, middle)
        if rows_count:
            before = arith.addi(before, middle)
        right = arith.cmpi(arith.CmpIPredicate.ult, before, begun)
        scf.YieldOp([arith.select(right, arith.addi(middle, index(1)), low), arith.select(right, high, middle)])
    return search.results[0]
