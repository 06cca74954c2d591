"""How rows of x are summed, weighted by the entries of a row of a sparse matrix: the inner loops of lower-rows."""

from collections.abc import Sequence

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, scf, vector

from gossamer.passes.loops.inner_loop import add_in_turns
from gossamer.passes.loops.prefetch import Ahead, elements_a_line
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import index, load_index, loop, mask_of, rolled, vector_of, zeros

ONE, GATHERED = 0, -1
"""Counts of vectors that say that there is one column, read element by element or gathered."""


class RowReader:
    """Sums rows of x, from a first column on, weighted by the entries of a sparse matrix."""

    def __init__(
        self,
        scalars: Scalars,
        coordinates: ir.Value,
        values: ir.Value,
        x: ir.Value,
        first: ir.Value,
        count: int,
        lanes: int,
        ahead: int | None,
    ) -> None:
        self.scalars, self.lanes = scalars, lanes
        self.vec, self.sums = (vector_of(lanes, t) for t in (scalars.element, scalars.wide))
        self.ahead = None if ahead is None else Ahead.into(ahead, -(-count * lanes // elements_a_line(x)))
        self.last = arith.subi(memref.dim(coordinates, index(0)), index(1))
        self.coordinates, self.values, self.x, self.first = coordinates, values, x, first
        if count <= 0 and ir.MemRefType(x.type).rank == 2:  # one column, which is a vector
            open_ = ir.ShapedType.get_dynamic_size()
            line = ir.MemRefType.get([open_], scalars.element)
            self.x = memref.ReinterpretCastOp(line, x, [], [memref.dim(x, index(0))], [], [0], [open_], [1]).result

    def row(self, begin: ir.Value, end: ir.Value, count: int, mask: ir.Value | None) -> list[ir.Value]:
        """The weighted sums over entries [begin, end): `count` vectors, or a scalar.

        Even one sum does not wait for itself, since the rows that follow are computed at the same time.
        """
        if count == GATHERED:
            return [self._dot(begin, end)]
        start = [zeros(self.sums)] * count if count > 0 else [self.scalars.zero()]
        if count == 1:
            return add_in_turns(begin, end, 2, 2, start, lambda p, sums: self._entry(p, sums, mask))
        with rolled(begin, end, start) if count > 0 else loop(begin, end, index(1), start) as entries:
            scf.YieldOp(self._entry(entries.induction_variable, list(entries.inner_iter_args), mask))
        return list(entries.results)

    def _dot(self, begin: ir.Value, end: ir.Value) -> ir.Value:
        """The sum over entries [begin, end) of a vector x, gathered by vectors."""
        narrow = ir.MemRefType(self.coordinates.type).element_type
        small = isinstance(narrow, ir.IntegerType) and ir.IntegerType(narrow).width < 32
        wide = ir.IntegerType.get_signless(32) if small else narrow
        with loop(begin, end, index(self.lanes), [zeros(self.sums)]) as steps:
            p = steps.induction_variable
            mask = mask_of(self.lanes, arith.subi(end, p))
            type_ = vector_of(self.lanes, narrow)
            none = arith.constant(type_, ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(narrow, 0)))
            at = vector.maskedload(type_, self.coordinates, [p], mask, none)
            if small:
                at = arith.extui(vector_of(self.lanes, wide), at)
            read = vector.gather(self.vec, self.x, [index(0)], at, mask, zeros(self.vec))
            weight = vector.maskedload(self.vec, self.values, [p], mask, zeros(self.vec))
            both = [each if each.type == self.sums else arith.extf(self.sums, each) for each in (weight, read)]
            scf.YieldOp([math.fma(*both, steps.inner_iter_args[0])])
        order = ir.Attribute.parse("#arith.fastmath<reassoc>")
        return vector.reduction(self.scalars.wide, vector.CombiningKind.ADD, steps.results[0], fastmath=order)

    def _entry(self, p: ir.Value, sums: Sequence[ir.Value], mask: ir.Value | None) -> list[ir.Value]:
        """The sums with an entry's share."""
        weight = self.scalars.widened(memref.load(self.values, [p]))
        source = load_index(self.coordinates, p)
        if mask is None:
            read = self.scalars.widened(memref.load(self.x, [source]))
            return [math.fma(weight, read, sums[0])]
        weight = vector.broadcast(self.sums, weight)
        columns = [arith.addi(self.first, index(n * self.lanes)) for n in range(len(sums))]
        if self.ahead is not None:
            later = load_index(self.coordinates, arith.minui(arith.addi(p, index(self.ahead.entries)), self.last))
            for line in range(self.ahead.lines):
                self.ahead.fetch(self.x, [later, arith.addi(self.first, index(line * elements_a_line(self.x)))])
        read = [vector.load(self.vec, self.x, [source, column]) for column in columns[:-1]]
        read.append(vector.maskedload(self.vec, self.x, [source, columns[-1]], mask, zeros(self.vec)))
        wide = [each if each.type == self.sums else arith.extf(self.sums, each) for each in read]
        return [math.fma(weight, each, total) for each, total in zip(wide, sums, strict=True)]
