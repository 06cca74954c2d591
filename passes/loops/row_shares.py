"""How threads share the rows of a CSR matrix: parts of equal work, found by bisection in its positions."""

from torch_mlir import ir
from torch_mlir.dialects import arith, scf

from gossamer.passes.loops.vectors import index, load_index

_SMALL = 1 << 13  # vectors of multiply-adds that one thread does in the time that a team needs to meet


def parts_of(entries: ir.Value, vectors: ir.Value, threads: ir.Value) -> ir.Value:
    """How many parts to make of `entries` that take so many vectors of multiply-adds each: one a thread, or one of little."""
    small = arith.cmpi(arith.CmpIPredicate.ult, arith.muli(entries, vectors), index(_SMALL))
    return arith.select(small, index(1), threads)


def share_of(total: ir.Value, part: ir.Value, parts: ir.Value) -> ir.Value:
    """total * part / parts"""
    return arith.divui(arith.muli(part, total), parts)


def ends_of(total: ir.Value, part: ir.Value, parts: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Where a part of `total` begins and ends."""
    return share_of(total, part, parts), share_of(total, arith.addi(part, index(1)), parts)


def rows_of(
    positions: ir.Value, rows: ir.Value, entries: ir.Value, part: ir.Value, parts: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The rows [low, high) of a part of a CSR matrix: a row counts as much as an entry."""
    ends = ends_of(arith.addi(entries, rows), part, parts)
    low, high = (first_row(positions, rows, end, rows_count=True) for end in ends)
    return low, high


def first_row(positions: ir.Value, rows: ir.Value, begun: ir.Value, *, rows_count: bool) -> ir.Value:
    """The first row, or `rows`, with positions[row] >= begun, by bisection.

    Where `rows_count`, it is positions[row] + row: a row counts as much as an entry, for what it costs beside its entries.
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
