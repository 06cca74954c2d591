"""What functions for some slots of an expert and some rows of its weight share: what they read, and where their sums go."""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.experts.stored_weights import Floats
from gossamer.passes.loops.vectors import index, load_index


class WeightRows:
    """The rows of the weights of all experts, one after the other."""

    def __init__(self, stored: Floats, weight: ir.Value, scales: ir.Value) -> None:
        self.stored = stored
        self.stride, self._groups = memref.dim(weight, index(2)), memref.dim(scales, index(2))
        self._line, self._scales = _line(weight), _line(scales)

    def read(self, row: ir.Value, column: ir.Value, left: ir.Value | None = None) -> list[ir.Value]:
        """Vectors of a row from a column on, of which `left` are there; None for all. Scales of groups are applied."""
        scale = None
        if self.stored.group:
            group = arith.addi(arith.muli(row, self._groups), arith.divui(column, index(self.stored.group)))
            scale = vector.broadcast(self.stored.vec, memref.load(self._scales, [group]))
        return self.stored.weights(self._line, self._at(row, column), scale, left)

    def fetch(self, row: ir.Value, column: ir.Value, locality: int) -> None:
        """Starts to fetch a line of a row: 2 into a second-level cache, 0 past it, for a single use."""
        memref.prefetch(self._line, [self._at(row, column)], False, locality, True)

    def scales(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """The scale of each row, where rows have one; none else."""
        return [memref.load(self._scales, [row]) for row in rows] if self.stored.scaled else []

    def _at(self, row: ir.Value, column: ir.Value) -> ir.Value:
        return arith.addi(arith.muli(row, self.stride), self.stored.place(column))


class SlotTile:
    """Some `slots` of an expert, the last one in place of those that are missing.

    given  the memory of x, the weight, its scales, the order of slots and the workspace; where the thread's part of that
           begins, and the scratch memory of its stream; the first slot of the block and the last one, the tile's place in the
           block
    """

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        self.slots, self.lanes = slots, product.lanes
        self.stored: Floats = product.stored
        self.x, weight, scales, order, workspace, base, offset, slot, last, self.local = given
        self.weight = WeightRows(self.stored, weight, scales)
        first = arith.addi(slot, self.local)
        numbers = [arith.minui(arith.addi(first, index(t)), last) for t in range(slots)]
        self.tokens = numbers if product.in_order else [product.token(load_index(order, number)) for number in numbers]
        self.columns = memref.dim(self.x, index(1))
        self.sums = product.sums(workspace, offset, arith.addi(arith.subi(last, slot), index(1)))
        self.panel, self.lines = product.panel(workspace, base), product.lines(workspace, base)


def _line(memory: ir.Value) -> ir.Value:
    """A memory of three dimensions as a line."""
    open_ = ir.ShapedType.get_dynamic_size()
    sizes = [memref.dim(memory, index(d)) for d in range(3)]
    total = arith.muli(arith.muli(sizes[0], sizes[1]), sizes[2])
    type_ = ir.MemRefType.get([open_], ir.MemRefType(memory.type).element_type)
    return memref.ReinterpretCastOp(type_, memory, [], [total], [], [0], [open_], [1]).result
