"""The innermost loops of products whose nonzeros are stored in groups of four. They add the products to the sums of rows.

scf.for %p = %begin to %end step 4 iter_args(4 vectors of sums)
  values[p..p + 4], coordinates[p..p + 4] as one load each
  4 times: vector.fma(a value in all lanes, x[its coordinate][0..15], one of the sums)

Values are loaded four at a time, because broadcasting one from memory takes as long as a load of x.

A row that is alone in its group prefetches values and coordinates of later rows, because processors fetch ahead only within a
page. With this, the chain of an expert of 1024 x 512 that no cache holds takes 262 us for 64 tokens instead of 279, and 107 for
16 instead of 123 (Zen 5). Rows in pairs do not prefetch: with it they took 6 % longer.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, memref, scf, vector

from gossamer.dialects.packing import Padded
from gossamer.passes.loops.inner_loop import InnerLoop, added_up, sets_of
from gossamer.passes.loops.prefetch import elements_a_line
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, vector_of, widened

_AHEAD = 512  # how far ahead a row prefetches, in nonzeros: several rows
_LINES = {"values": 3, "coordinates": 2}
"""Cache lines that a row prefetches of each array: about as many as a row itself has at 90 % zeros."""


@dataclass(frozen=True)
class RowsInFours(InnerLoop):
    """Inner loops for a weight of `groups` groups of rows, in blocks of `columns` columns.

    A group of `Padded` has one row, one of `RowPairs` two. `lanes` are those of the target; `vec` may be half as wide.
    """

    groups: int
    columns: int
    lanes: int

    def add(self, panel: ir.Value, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of the group's nonzeros in this block of columns.

        The four nonzeros of a row in a step take turns with its sets of sums.
        """
        begin, end = self.entries(self._number(panel, group))
        if len(sums) == self.vectors:
            self._fetch(begin)
        return self._fours(begin, end, self._origin(panel), sums)

    def _fours(self, begin: ir.Value, end: ir.Value, origin: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of the nonzeros [begin, end): four of each row of the group in turn."""
        ways, height = max(1, 4 // self.vectors), len(sums) // self.vectors
        with loop(begin, end, index(height * Padded.GROUP), sets_of(sums, ways)) as steps:
            totals = list(steps.inner_iter_args)
            for row in range(height):
                first = arith.addi(steps.induction_variable, index(row * Padded.GROUP)) if row else steps.induction_variable
                for i, (weight, column) in enumerate(self._group(first)):
                    at = i % ways * len(sums) + row * self.vectors
                    mine = slice(at, at + self.vectors)
                    totals[mine] = self._multiplied(weight, arith.addi(origin, column), totals[mine])
            scf.YieldOp(totals)
        return added_up(list(steps.results), len(sums))

    def _multiplied(self, weight: ir.Value, column: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus a value (in all lanes) times the column of x that begins at `column`."""
        lanes, x = self.vec.shape[0], self._flat_x()
        loaded = (vector.load(self.vec, x, [arith.addi(column, index(v * lanes))]) for v in range(self.vectors))
        return [vector.fma(weight, each, total) for each, total in zip(loaded, sums, strict=True)]

    def _flat_x(self) -> ir.Value:
        elements = self._width * self._columns_of_x
        return memref.collapse_shape(ir.MemRefType.get([elements], self.vec.element_type), self.packed, [[0, 1]])

    def _origin(self, panel: ir.Value) -> ir.Value:
        """Returns the place in x where the columns of a panel begin. It is 0 if x has only the columns of this panel."""
        return arith.muli(panel, index(self.columns * self._width)) if self._columns_of_x > self.columns else index(0)

    def _number(self, panel: ir.Value, group: ir.Value) -> ir.Value:
        """Returns the number of a group in a panel, counted over all panels."""
        return arith.addi(arith.muli(panel, index(self.groups)), group)

    def _fetch(self, begin: ir.Value) -> None:
        """Prefetches the values and coordinates of rows that come `_AHEAD` nonzeros later."""
        for name, lines in _LINES.items():
            array = getattr(self, name)
            for line in range(lines):
                at = index(_AHEAD + line * elements_a_line(array))
                memref.prefetch(array, [arith.addi(begin, at)], False, 3, True)

    @property
    def _width(self) -> int:
        return self.vectors * self.vec.shape[0]

    @property
    def _columns_of_x(self) -> int:
        return ir.MemRefType(self.packed.type).shape[0]

    def _group(self, p: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """Returns for each nonzero of a group, from p on, its value in all lanes, and its column's place in the block's x."""
        size, lanes = Padded.GROUP, self.vec.shape[0]
        stored = vector_of(size, ir.MemRefType(self.values.type).element_type)
        values = widened(vector.load(stored, self.values, [p]), vector_of(size, self.vec.element_type))
        repeated = self._kept(vector.shuffle(values, values, [i % size for i in range(max(size, lanes))]))
        pairs = []
        for i, scaled in enumerate(self._coordinates(p)):
            weight = vector.shuffle(repeated, repeated, [lane // size * size + i for lane in range(lanes)])
            pairs.append((weight, self._scaled(scaled)))
        return pairs

    def _scaled(self, coordinate: ir.Value) -> ir.Value:
        """Returns the place where the column of a stored coordinate begins in the x of its panel."""
        return arith.divui(arith.muli(coordinate, index(self._width)), index(Padded.SCALE))

    def _coordinates(self, p: ir.Value) -> list[ir.Value]:
        """Returns the stored coordinates of a group, from p on.

        Whole vectors of x keep the load units busy, so one load gets all four. Half vectors leave time for four loads.
        """
        if self.vec.shape[0] < self.lanes:
            return [load_index(self.coordinates, arith.addi(p, index(i))) for i in range(Padded.GROUP)]
        i16, i64 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(64)
        loaded = vector.load(vector_of(Padded.GROUP, i16), self.coordinates, [p])
        together = vector.extract(vector.bitcast(vector_of(1, i64), loaded), [], [0])
        shifted = (arith.shrui(together, arith.constant(i64, 16 * i)) for i in range(Padded.GROUP))
        return [arith.index_castui(ir.IndexType.get(), arith.trunci(i16, each)) for each in shifted]

    def _kept(self, values: ir.Value) -> ir.Value:
        """Returns `values` through inline assembly, which hides them from LLVM. It would else broadcast each from memory."""
        bits = self.lanes * 8 * byte_width(self.vec.element_type)
        if bits == 128:
            return values
        return llvm.inline_asm(values.type, [values], "", "=v,0" if bits == 512 else "=x,0")
