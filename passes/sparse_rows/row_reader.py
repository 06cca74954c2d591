"""The inner loops of lower-rows. They sum rows of x, weighted by the entries of a row of a sparse matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.passes.loops.inner_loop import add_in_turns
from gossamer.passes.loops.prefetch import Ahead, elements_a_line
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import index, load_index, loop, mask_of, rolled, vector_of, zeros


@dataclass(frozen=True)
class Entries:
    """The entries of a sparse matrix, and the x whose rows they weight and sum."""

    scalars: Scalars
    coordinates: ir.Value
    values: ir.Value
    x: ir.Value

    def column(self) -> ir.Value:
        """Returns the only column of x, as a vector."""
        if ir.MemRefType(self.x.type).rank == 1:
            return self.x
        open_ = ir.ShapedType.get_dynamic_size()
        line = ir.MemRefType.get([open_], self.scalars.element)
        rows = memref.dim(self.x, index(0))
        return memref.ReinterpretCastOp(line, self.x, [], [rows], [], [0], [open_], [1]).result


@dataclass(frozen=True)
class ColumnReader:
    """Sums one column of x, element by element."""

    mask: ClassVar[None] = None
    entries: Entries
    column: ir.Value

    def row(self, begin: ir.Value, end: ir.Value) -> list[ir.Value]:
        """Returns the weighted sum over entries [begin, end), a scalar."""
        return add_in_turns(begin, end, 2, 2, [self.entries.scalars.zero()], self._entry)

    def _entry(self, p: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sum plus the product of one entry."""
        given, scalars = self.entries, self.entries.scalars
        weight = scalars.widened(memref.load(given.values, [p]))
        read = scalars.widened(memref.load(self.column, [load_index(given.coordinates, p)]))
        return [math.fma(weight, read, sums[0])]


@dataclass(frozen=True)
class GatheringReader:
    """Sums one column of x, gathered by vectors."""

    mask: ClassVar[None] = None
    entries: Entries
    column: ir.Value
    lanes: int

    def row(self, begin: ir.Value, end: ir.Value) -> list[ir.Value]:
        """Returns the weighted sum over entries [begin, end), a scalar."""
        given, scalars = self.entries, self.entries.scalars
        element, sums = (vector_of(self.lanes, t) for t in (scalars.element, scalars.wide))
        narrow = ir.MemRefType(given.coordinates.type).element_type
        small = isinstance(narrow, ir.IntegerType) and ir.IntegerType(narrow).width < 32
        wide = ir.IntegerType.get_signless(32) if small else narrow
        with loop(begin, end, index(self.lanes), [zeros(sums)]) as steps:
            p = steps.induction_variable
            mask = mask_of(self.lanes, arith.subi(end, p))
            type_ = vector_of(self.lanes, narrow)
            none = arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(narrow, 0)))
            at = vector.maskedload(type_, given.coordinates, [p], mask, none)
            if small:
                at = arith.extui(vector_of(self.lanes, wide), at)
            read = vector.gather(element, self.column, [index(0)], at, mask, zeros(element))
            weight = vector.maskedload(element, given.values, [p], mask, zeros(element))
            both = [each if each.type == sums else arith.extf(sums, each) for each in (weight, read)]
            scf.YieldOp([math.fma(*both, steps.inner_iter_args[0])])
        order = ir.Attribute.parse("#arith.fastmath<reassoc>")
        return [vector.reduction(scalars.wide, vector.CombiningKind.ADD, steps.results[0], fastmath=order)]


class VectorReader:
    """Sums `count` vectors of columns of x, from a first column on. The last vector is masked. If `ahead` is given, later rows
    are prefetched into the cache of this level."""

    def __init__(self, entries: Entries, first: ir.Value, count: int, lanes: int, mask: ir.Value, ahead: int | None) -> None:
        self.entries, self.count, self.mask = entries, count, mask
        self.vec, self.sums = (vector_of(lanes, t) for t in (entries.scalars.element, entries.scalars.wide))
        line = elements_a_line(entries.x)
        self.ahead = None if ahead is None else Ahead.into(ahead, -(-count * lanes // line))
        self.last = arith.subi(memref.dim(entries.coordinates, index(0)), index(1))
        self.columns = [arith.addi(first, index(n * lanes)) for n in range(count)]
        self.lines = [arith.addi(first, index(n * line)) for n in range(self.ahead.lines if self.ahead is not None else 0)]

    def row(self, begin: ir.Value, end: ir.Value) -> list[ir.Value]:
        """Returns the weighted sums over entries [begin, end), a list of vectors."""
        start = [zeros(self.sums)] * self.count
        if self.count == 1:
            return add_in_turns(begin, end, 2, 2, start, self._entry)
        with rolled(begin, end, start) as entries:
            scf.YieldOp(self._entry(entries.induction_variable, list(entries.inner_iter_args)))
        return list(entries.results)

    def _entry(self, p: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of one entry."""
        given = self.entries
        weight = given.scalars.widened(memref.load(given.values, [p]))
        source = load_index(given.coordinates, p)
        weight = vector.broadcast(self.sums, weight)
        if self.ahead is not None:
            later = load_index(given.coordinates, arith.minui(arith.addi(p, index(self.ahead.entries)), self.last))
            for line in self.lines:
                self.ahead.fetch(given.x, [later, line])
        read = [vector.load(self.vec, given.x, [source, column]) for column in self.columns[:-1]]
        read.append(vector.maskedload(self.vec, given.x, [source, self.columns[-1]], self.mask, zeros(self.vec)))
        wide = [each if each.type == self.sums else arith.extf(self.sums, each) for each in read]
        return [math.fma(weight, each, total) for each, total in zip(wide, sums, strict=True)]


Reader = ColumnReader | GatheringReader | VectorReader
"""Sums the rows of x that entries [begin, end) weight. Gives vectors, the last one with a `mask`, or a scalar."""
