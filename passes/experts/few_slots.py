"""Products of all slots of an expert that has few. They read one or two rows of the weight at a time, in place.

func.private @region_few4(...)
  for each 8 rows
    for each 2 of them
      scf.for each 2 vectors of columns iter_args(4 slots x 2 rows x 2 sums)
        multiply-adds; prefetch the next rows
      store the 2 sums of each slot and row, added up, in scratch memory
    add the totals of 8 rows and 4 slots to the sums

Most of the time is spent reading the weight. How to prefetch it depends on the target:

streams, two slots or more  bypass the second-level cache: for 8 slots that is 1.5 times as fast (Zen 5)
streams, one slot           nothing: the processor's own prefetcher is best for a single sequence of reads
others                      16 KB ahead into the second-level cache. On Emerald Rapids that is 1.3 to 1.5 times as fast as to
                            bypass it, and for one slot 1.5 times as fast as no prefetch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, vector

from gossamer.passes.experts.slot_tile import SlotTile
from gossamer.passes.loops.vectors import index, loop, sums_across, zeros

HEIGHT = 8
"""Rows whose totals are computed together."""
_AHEAD = 2  # how many rows ahead to prefetch


@dataclass(frozen=True)
class Shape:
    """Rows that are multiplied at once, and sums of each slot and row, so that enough multiply-adds are independent."""

    rows: int
    ways: int


_WIDE = {8: Shape(2, 1), 6: Shape(2, 2), 4: Shape(2, 2), 3: Shape(1, 4), 2: Shape(1, 4), 1: Shape(1, 8)}
SHAPES = {512: _WIDE, 256: {3: Shape(1, 3), 2: Shape(1, 4), 1: Shape(1, 8)}, 128: _WIDE}
"""By the bits of vectors and the number of slots, the most first. All sums fit into registers."""


def slots_at_once(bits: int) -> tuple[int, ...]:
    """Returns the numbers of slots for which there are functions, the most first."""
    return tuple(SHAPES[bits])


class FewSlots(SlotTile):
    """Emits the products of all slots of a block with `rows` rows of the weight, from `row` and the column `begin` on."""

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        *others, self.row, self.begin, self.rows = given
        super().__init__(product, slots, *others)
        self.at, self.depth, self.height = index(0), self.columns, min(HEIGHT, self.lanes)
        self.shape = self._shapes(product.bits)[slots]
        self.unrolled = self.shape.ways

    def emit(self) -> None:
        """Emits the body of a function."""
        last, each = arith.subi(self.rows, index(1)), self.shape.rows
        with loop(index(0), self.rows, index(self.height)) as tiles:
            first = tiles.induction_variable
            rows = [arith.addi(self.row, arith.minui(arith.addi(first, index(r)), last)) for r in range(self.height)]
            with loop(index(0), index(self.height), index(each)) as some:
                at = some.induction_variable
                own = [
                    arith.addi(self.row, arith.minui(arith.addi(first, arith.addi(at, index(r))), last)) for r in range(each)
                ]
                for number, value in enumerate(self._sums(own)):
                    t, r = divmod(number, each)
                    vector.store(value, self.lines, [index(t), arith.addi(at, index(r)), index(0)])
            self._add(first, self.weight.scales(rows))

    def _shapes(self, bits: int) -> dict[int, Shape]:
        """Returns the shapes for vectors of `bits` bits, by the number of slots."""
        return SHAPES[bits]

    def _sums(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Returns a vector of sums for each slot and row. The rows of a slot follow each other."""
        one, ways, count = self.stored.columns, self.shape.ways, self.slots * len(rows)
        step = index(self.unrolled * one)
        whole = arith.muli(arith.divui(self.depth, step), step)
        with loop(index(0), whole, step, [zeros(self.stored.vec)] * (count * ways)) as steps:
            sums, places = list(steps.inner_iter_args), [index(n * one) for n in range(self.unrolled)]
            columns = [arith.addi(steps.induction_variable, place) for place in places]
            for row in rows:
                for column in columns[:: max(1, self.stored.in_line // one)]:
                    self._fetch(row, column)
            for n, column in enumerate(columns):
                own = slice(n % ways * count, (n % ways + 1) * count)
                sums[own] = self._step(rows, column, sums[own], None)
            scf.YieldOp(sums)
        found = list(steps.results)
        totals = [self._added(found[at::count]) for at in range(count)]
        with loop(whole, self.depth, index(one), totals) as rest:
            column = rest.induction_variable
            scf.YieldOp(self._step(rows, column, list(rest.inner_iter_args), arith.subi(self.depth, column)))
        return list(rest.results)

    def _fetch(self, row: ir.Value, column: ir.Value) -> None:
        """Prefetches a line that is read later."""
        if not self.streams:
            self.weight.fetch_beyond(row, column)
        elif self.slots > 1:
            self.weight.fetch(arith.addi(row, index(_AHEAD)), column, True)

    def _step(self, rows: list[ir.Value], column: ir.Value, sums: list[ir.Value], left: ir.Value | None) -> list[ir.Value]:
        found, weights = list(sums), [self.weight.read(row, arith.addi(self.begin, column), left) for row in rows]
        for t, x in enumerate(self._tokens(column, left)):
            for r, own in enumerate(weights):
                at = t * len(rows) + r
                found[at] = self.stored.multiplied(own, x, found[at])
        return found

    def _tokens(self, column: ir.Value, left: ir.Value | None) -> Iterator[list[ir.Value]]:
        """Yields the columns of each token that a step multiplies."""
        for token in self.tokens:
            yield self.stored.x(self.x, token, column, left)

    def _added(self, sums: list[ir.Value]) -> ir.Value:
        """Returns the sum of a few vectors."""
        while len(sums) > 1:
            pairs = zip(sums[::2], sums[1::2], strict=False)
            sums = [*(arith.addf(a, b) for a, b in pairs), *sums[len(sums) // 2 * 2 :]]
        return sums[0]

    def _add(self, row: ir.Value, scales: Sequence[ir.Value]) -> None:
        """Adds the totals of the vectors in memory, for each slot and some rows, to the sums, from `row` of the block on."""
        height, slot = self.height, 0
        together, kind = max(1, self.lanes // height), ir.VectorType.get([height], ir.F32Type.get())
        while slot < self.slots:
            count = 1 << min(together, self.slots - slot).bit_length() - 1
            lines = [[index(t), index(r), index(0)] for t in range(slot, slot + count) for r in range(height)]
            totals = sums_across([vector.load(self.stored.vec, self.lines, each) for each in lines])
            for t in range(count):
                own = vector.extract_strided_slice(kind, totals, [t * height], [height], [1])
                if scales:
                    own = arith.mulf(own, vector.from_elements(kind, scales))
                at = [arith.addi(self.local, index(slot + t)), arith.addi(self.at, row)]
                vector.store(arith.addf(vector.load(kind, self.sums, at), own), self.sums, at)
            slot += count
