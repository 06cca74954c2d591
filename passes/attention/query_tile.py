"""The arithmetic of attention for a tile of rows in lanes, with other rows whose elements are scalars.

    turned [D][rows]       the transposed tile, with its rows in lanes
    products               for a few other rows, the dot products with all rows of the tile
    weighted sums          of other rows, [D][rows], weighted by [others][rows]

So no work goes across lanes, heads may have any size, and the other rows are read in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.dialects.attention import TILE_QUERIES
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.vectors import in_all_lanes, index, loop, mask_of, transpose, vector_of, zeros


@dataclass(frozen=True)
class Rows:
    """`count` rows in a memory. The first one begins at `base`, the next one `stride` elements further."""

    memory: ir.Value
    base: ir.Value
    stride: ir.Value
    count: ir.Value

    def at(self, row: ir.Value) -> ir.Value:
        """Returns the place where a row begins. Rows past the last one repeat it."""
        inside = arith.minui(row, arith.subi(self.count, index(1)))
        return arith.addi(self.base, arith.muli(inside, self.stride))

    @property
    def element(self) -> ir.Type:
        """The type of the elements."""
        return ir.MemRefType(self.memory.type).element_type

    @property
    def in_pairs(self) -> bool:
        """Whether elements are bf16, which instructions multiply in pairs and add up."""
        return isinstance(self.element, ir.BF16Type)


@dataclass(frozen=True)
class WeightedRows:
    """`groups` groups of `each` rows, and their weights for the rows of a tile.

    weights   [groups * each][TILE_QUERIES]
    place_of  (group, number of a row in it) → the memory of the row, and the place where it begins
    hides     group → whether some rows may be hidden. They have weight 0, but their elements may be NaN or infinite.
    """

    groups: ir.Value
    each: int
    weights: ir.Value
    place_of: Callable[[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
    hides: Callable[[ir.Value], ir.Value]


class QueryTile:
    """TILE_QUERIES rows of `size` elements of f32, on vectors of `bits`."""

    def __init__(self, size: int, bits: int) -> None:
        self.size, self.lanes = size, bits // 32
        self.vectors = TILE_QUERIES // self.lanes
        self.vec = vector_of(self.lanes, ir.F32Type.get())
        self.at_once = registers(bits) // 2 // self.vectors  # number of other rows that share each load of the tile
        self.padded = -(-size // self.lanes) * self.lanes

    def memory(self, rows: int) -> ir.MemRefType:
        """Returns the type of memory of [rows][TILE_QUERIES]."""
        return ir.MemRefType.get([rows, TILE_QUERIES], self.vec.element_type)

    def load(self, memory: ir.Value, row: ir.Value) -> list[ir.Value]:
        """Loads the vectors of a row of such a memory."""
        return [vector.load(self.vec, memory, [row, index(v * self.lanes)]) for v in range(self.vectors)]

    def store(self, values: Sequence[ir.Value], memory: ir.Value, row: ir.Value) -> None:
        """Stores the vectors of a row of such a memory."""
        for v, value in enumerate(values):
            vector.store(value, memory, [row, index(v * self.lanes)])

    def clear(self, memory: ir.Value) -> None:
        """Stores zeros in all rows of a memory for `turn_back`."""
        with loop(index(0), index(self.padded), index(1)) as ds:
            self.store([zeros(self.vec)] * self.vectors, memory, ds.induction_variable)

    def scale(self, memory: ir.Value, factors: Sequence[ir.Value]) -> None:
        """Multiplies memory[d][r] by factors[r]."""
        with loop(index(0), index(self.size), index(1)) as ds:
            values = self.load(memory, ds.induction_variable)
            self.store([arith.mulf(a, b) for a, b in zip(values, factors, strict=True)], memory, ds.induction_variable)

    def turn(self, rows: Rows, first: ir.Value, turned: ir.Value, factor: ir.Value) -> None:
        """Sets turned[d][r] = rows[first + r][d] * factor. Pairs of bf16: turned[d][r] = rows[first + r][2 d], [2 d + 1]."""
        pairs = rows.in_pairs
        line_type = vector_of(2 * self.lanes, rows.element) if pairs else self.vec

        def one(at: ir.Value, columns: ir.Value, v: int) -> None:
            mask, lines = mask_of(2 * self.lanes, arith.muli(columns, index(2))) if pairs else mask_of(self.lanes, columns), []
            behind = arith.muli(at, index(2)) if pairs else at
            for r in range(v * self.lanes, (v + 1) * self.lanes):
                place = arith.addi(rows.at(arith.addi(first, index(r))), behind)
                line = vector.maskedload(line_type, rows.memory, [place], mask, zeros(line_type))
                lines.append(vector.bitcast(self.vec, line) if pairs else arith.mulf(line, factor))
            for d, value in enumerate(transpose(lines)):
                vector.store(value, turned, [arith.addi(at, index(d)), index(v * self.lanes)])

        self._squares(one, self.size // 2 if pairs else self.size)

    def turn_back(self, turned: ir.Value, rows: Rows, first: ir.Value) -> None:
        """Stores turned[d][r] to rows[first + r][d], if there is such a row."""

        def one(at: ir.Value, columns: ir.Value, v: int) -> None:
            lines = [
                vector.load(self.vec, turned, [arith.addi(at, index(d)), index(v * self.lanes)]) for d in range(self.lanes)
            ]
            for r, value in enumerate(transpose(lines), v * self.lanes):
                row = arith.addi(first, index(r))
                there = arith.cmpi(arith.CmpIPredicate.ult, row, rows.count)
                mask = mask_of(self.lanes, arith.select(there, columns, index(0)))
                vector.maskedstore(rows.memory, [arith.addi(rows.at(row), at)], mask, value)

        self._squares(one, self.size)

    def _squares(self, one: Callable[[ir.Value, ir.Value, int], None], size: int) -> None:
        """Calls `one` for each square of `lanes` rows and columns, with its first column, the number of its columns, and its
        vector of rows."""
        with loop(index(0), index(size), index(self.lanes)) as columns:
            at = columns.induction_variable
            width = arith.minui(arith.subi(index(size), at), index(self.lanes))
            for v in range(self.vectors):
                one(at, width, v)

    def products(self, rows: Rows, numbers: Sequence[ir.Value], turned: ir.Value) -> list[list[ir.Value]]:
        """Returns for each of the rows of these numbers its products with all rows of the tile."""
        size, width = self.size // 2 if rows.in_pairs else self.size, self.vectors
        step, places = gcd(size, 4), [rows.at(number) for number in numbers]
        with loop(index(0), index(size), index(step), [zeros(self.vec)] * (len(places) * width)) as ds:
            sums = list(ds.inner_iter_args)
            for u in range(step):
                d = arith.addi(ds.induction_variable, index(u))
                own = self.load(turned, d)
                if rows.in_pairs:
                    own = [vector.bitcast(vector_of(2 * self.lanes, rows.element), each) for each in own]
                for n, place in enumerate(places):
                    if rows.in_pairs:
                        at = arith.addi(place, arith.muli(d, index(2)))
                        element = in_all_lanes(vector.load(vector_of(2, rows.element), rows.memory, [at]))
                    else:
                        element = self._scalar(rows.memory, arith.addi(place, d))
                    for v in range(width):
                        i = n * width + v
                        if rows.in_pairs:
                            sums[i] = x86.DotBF16Op(sums[i], element, own[v]).result
                        else:
                            sums[i] = vector.fma(element, own[v], sums[i])
            scf.YieldOp(sums)
        return [list(ds.results)[n * width : (n + 1) * width] for n in range(len(places))]

    def add_weighted(self, sums: ir.Value, factors: Sequence[ir.Value] | None, rows: WeightedRows) -> None:
        """Sets sums[d][r] = sums[d][r] * factors[r] + the sum of rows[n][d] weights[n][r]."""
        whole = self.size - self.size % self.at_once
        if whole:
            with loop(index(0), index(whole), index(self.at_once)) as ds:
                self._add_columns(sums, factors, rows, ds.induction_variable, self.at_once)
        if self.size > whole:
            self._add_columns(sums, factors, rows, index(whole), self.size - whole)

    def _add_columns(
        self, sums: ir.Value, factors: Sequence[ir.Value] | None, rows: WeightedRows, at: ir.Value, count: int
    ) -> None:
        """Does the same for `count` columns of the rows, from `at` on, whose sums fit into registers."""
        start = []
        for n in range(count):
            values = self.load(sums, arith.addi(at, index(n)))
            start += values if factors is None else [arith.mulf(a, f) for a, f in zip(values, factors, strict=True)]
        with loop(index(0), rows.groups, index(1), start) as outer:
            group, carried = outer.induction_variable, list(outer.inner_iter_args)
            choice = scf.IfOp(rows.hides(group), [self.vec] * len(carried), has_else=True)
            for block, hides in ((choice.then_block, True), (choice.else_block, False)):
                with ir.InsertionPoint(block):
                    scf.YieldOp(self._add_group(rows, group, at, carried, hides))
            scf.YieldOp(list(choice.results))
        for n in range(count):
            self.store(outer.results[n * self.vectors : (n + 1) * self.vectors], sums, arith.addi(at, index(n)))

    def _add_group(
        self, rows: WeightedRows, group: ir.Value, at: ir.Value, carried: list[ir.Value], hides: bool
    ) -> list[ir.Value]:
        """Returns sums of columns plus the weighted rows of one group. If it `hides` some, rows with weight 0 are skipped."""
        with loop(index(0), index(rows.each), index(4), carried) as inner:
            totals = list(inner.inner_iter_args)
            for u in range(4):
                number = arith.addi(inner.induction_variable, index(u))
                memory, place = rows.place_of(group, number)
                own = self.load(rows.weights, arith.addi(arith.muli(group, index(rows.each)), number))
                none = zeros(self.vec)
                seen = [arith.cmpf(arith.CmpFPredicate.UNE, weight, none) for weight in own] if hides else own
                for i, total in enumerate(totals):
                    n, v = divmod(i, self.vectors)
                    if v == 0:
                        element = self._scalar(memory, arith.addi(place, arith.addi(at, index(n))))
                    more = vector.fma(element, own[v], total)
                    totals[i] = arith.select(seen[v], more, total) if hides else more
            scf.YieldOp(totals)
        return list(inner.results)

    def _scalar(self, memory: ir.Value, place: ir.Value) -> ir.Value:
        return vector.broadcast(self.vec, memref.load(memory, [place]))
