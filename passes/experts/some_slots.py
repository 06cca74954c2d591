"""Products of the slots of an expert that has some, in vectors of 256 bits. Its weight is read in place, and x is packed.

func.private @region_some8(...)
  copy the columns [low, low + depth) of 8 tokens' rows into scratch memory: [columns / 8][8 tokens][8 columns]
  for each 8 rows: like @region_few4 (few_slots.py), with x from scratch memory; prefetch the row that comes 8 rows later

16 registers of 256 bits hold the sums of few slots only. A panel (many_slots.py) pays from some dozens of slots on, because
to transpose a weight takes as long as to multiply it with 8 slots. So up to 48 slots are multiplied, 8 at a time. The first 8
read the rows from memory, the others from the second-level cache. Packed columns stay in the first-level cache. In place they
would not: rows of x often lie at multiples of 4 KB, where they push each other out.

On Zen 3, 64 experts of 1024 x 512 with 8 slots each take 0.7 of the time that panels take, and without prefetches as long.
"""

from collections.abc import Iterator
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts import few_slots
from gossamer.passes.experts.few_slots import HEIGHT, FewSlots, Shape
from gossamer.passes.loops.vectors import index

BITS = 256
"""Width of the vectors for which this pays."""
DEPTH = 512
"""Most columns that are packed."""
ROWS = 64
"""Rows that are multiplied with all slots before the next rows are read."""
SHAPES = {8: Shape(1, 1), 6: Shape(2, 1), 4: Shape(2, 1), **few_slots.SHAPES[BITS]}
"""By the number of slots, the most first. All sums fit into registers."""
MOST = 48
"""Most slots of a block."""
LINE = 128
"""Rows of a block."""


class SomeSlots(FewSlots):
    """Emits the products of up to `slots` slots from `local` of a block on, with `rows` rows of the weight.

    low, depth  the columns [low, low + depth) are multiplied
    row, begin  where the rows begin in memory
    at          the rows' place in the block
    """

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        *others, self.low, depth, row, begin, rows, at = given
        super().__init__(product, slots, *others, row, begin, rows)
        self.at, self.depth, self.one, workspace, base = at, depth, self.stored.columns, others[4], others[5]
        self.unrolled = max(self.shape.ways, self.stored.in_line // self.one)  # a whole cache line, to prefetch it once
        kind = ir.MemRefType.get([DEPTH * slots], ir.F32Type.get())
        self.packed = memref.view(kind, workspace, arith.addi(base, index(product.before_packed)), [])

    def emit(self) -> None:
        """Emits the body of a function."""
        self.pack(self.low, self.depth, self.packed, lambda *at: [self._place(*at)])
        super().emit()

    def _shapes(self, bits: int) -> dict[int, Shape]:
        return SHAPES

    def _place(self, column: ir.Value, slot: int, part: int) -> ir.Value:
        """Returns the place of a packed vector: of a slot, its columns from `column` on."""
        return arith.addi(arith.muli(column, index(self.slots)), index(slot * self.one + part * self.lanes))

    def _fetch(self, row: ir.Value, column: ir.Value) -> None:
        self.weight.fetch(arith.addi(row, index(HEIGHT)), arith.addi(self.begin, column))

    def _tokens(self, column: ir.Value, left: ir.Value | None) -> Iterator[list[ir.Value]]:
        for t in range(self.slots):
            places = [self._place(column, t, n) for n in range(self.one // self.lanes)]
            yield [vector.load(self.stored.vec, self.packed, [place]) for place in places]
