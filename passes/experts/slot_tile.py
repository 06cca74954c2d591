"""What tiles of some slots and rows share: where they read, and how their totals get into scratch memory."""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts.stored_weights import Floats
from gossamer.passes.loops.vectors import index, load_index, sums_across

BLOCK = 32
"""Rows of scratch memory, and of a weight that are computed for all slots before the next ones: with 1024 columns of f32 they
stay in a second-level cache."""


class SlotTile:
    """Some `slots` of an expert, the last one in place of those that are missing, and rows of its weight.

    given  the memory of x, the weight, its scales, the order of slots and the workspace; where the scratch memory lies in that;
           the first slot of the block and the last one, the tile's place in the block; the first row of the weight, the step
           from each to the next one
    """

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        self.slots, self.lanes = slots, product.lanes
        self.stored: Floats = product.stored
        self.x, weight, scales, order, workspace, offset, slot, last, self.local, self.place, self.step = given
        self.sums = memref.view(product.scratch, workspace, offset, [])
        self.lines = memref.view(product.lines, workspace, arith.addi(offset, index(product.bytes)), [])
        first = arith.addi(slot, self.local)
        numbers = [arith.minui(arith.addi(first, index(t)), last) for t in range(slots)]
        self.tokens = numbers if product.in_order else [product.token(load_index(order, number)) for number in numbers]
        self.columns, self.stride, self.groups = (
            memref.dim(self.x, index(1)),
            memref.dim(weight, index(2)),
            memref.dim(scales, index(2)),
        )
        self.line, self.scales = _line(weight), _line(scales)

    def row(self, number: ir.Value, last: ir.Value) -> ir.Value:
        """The row of the weight at a place of the block, at most the last one."""
        return arith.addi(self.place, arith.muli(arith.minui(number, last), self.step))

    def weights(self, row: ir.Value, column: ir.Value, left: ir.Value | None = None) -> list[ir.Value]:
        """Vectors of a row from a column on, of which `left` are there; None for all."""
        at = arith.addi(arith.muli(row, self.stride), self.stored.place(column))
        scale = None
        if self.stored.group:
            group = arith.addi(arith.muli(row, self.groups), arith.divui(column, index(self.stored.group)))
            scale = vector.broadcast(self.stored.vec, memref.load(self.scales, [group]))
        return self.stored.weights(self.line, at, scale, left)

    def tokens_at(self, column: ir.Value, left: ir.Value | None = None) -> list[list[ir.Value]]:
        """Vectors of each slot's row of x."""
        return [self.stored.x(self.x, token, column, left) for token in self.tokens]

    def fetch(self, row: ir.Value, column: ir.Value, locality: int) -> None:
        """Starts to fetch a line of a row: 2 into a second-level cache, 0 past it, for a single use."""
        at = arith.addi(arith.muli(row, self.stride), self.stored.place(column))
        memref.prefetch(self.line, [at], False, locality, True)

    def add(self, sums: Sequence[ir.Value], row: ir.Value, height: int, rows: Sequence[ir.Value]) -> None:
        """Adds the totals of sums, of `height` rows for each slot, to scratch memory from `row` of the block on; `rows` are
        those of the weight."""
        together, slot, kind = max(1, self.lanes // height), 0, ir.VectorType.get([height], ir.F32Type.get())
        scale = self._scales(rows, kind)
        while slot < self.slots:
            count = 1 << min(together, self.slots - slot).bit_length() - 1
            totals = sums_across(sums[slot * height : (slot + count) * height])
            for t in range(count):
                own = vector.extract_strided_slice(kind, totals, [t * height], [height], [1])
                if scale is not None:
                    own = arith.mulf(own, scale)
                at = [arith.addi(self.local, index(slot + t)), row]
                vector.store(arith.addf(vector.load(kind, self.sums, at), own), self.sums, at)
            slot += count

    def _scales(self, rows: Sequence[ir.Value], kind: ir.VectorType) -> ir.Value | None:
        """The scale of each row, where rows of integers have one."""
        if self.stored.group or not isinstance(self.stored.element, ir.IntegerType):
            return None
        return vector.from_elements(kind, [memref.load(self.scales, [row]) for row in rows])


def _line(memory: ir.Value) -> ir.Value:
    """A memory of three dimensions as a line."""
    open_ = ir.ShapedType.get_dynamic_size()
    sizes = [memref.dim(memory, index(d)) for d in range(3)]
    total = arith.muli(arith.muli(sizes[0], sizes[1]), sizes[2])
    type_ = ir.MemRefType.get([open_], ir.MemRefType(memory.type).element_type)
    return memref.ReinterpretCastOp(type_, memory, [], [total], [], [0], [open_], [1]).result
