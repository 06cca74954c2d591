"""The base of functions for some slots of an expert and some rows of its weight: operands, and the places of sums."""

from collections.abc import Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector, x86

from gossamer.passes.experts.stored_weights import Floats
from gossamer.passes.loops.vectors import byte_width, index, load_index

_BEYOND = 16 << 10  # bytes


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
        return self.stored.weights(self._line, self.place(row, column), scale, left)

    def fetch(self, row: ir.Value, column: ir.Value, streams: bool = False) -> None:
        """Starts to fetch a line of a row into a second-level cache; past it, for a single use, where it `streams`."""
        memref.prefetch(self._line, [self.place(row, column)], False, 0 if streams else 2, True)

    def fetch_at(self, place: ir.Value) -> None:
        """The same at a place in the line that all rows are."""
        memref.prefetch(self._line, [place], False, 2, True)

    def place(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """Where a column of a row lies in the line that all rows are."""
        return arith.addi(arith.muli(row, self.stride), self.stored.place(column))

    def fetch_beyond(self, row: ir.Value, column: ir.Value) -> None:
        """The same of what lies some KB further on in memory, in whatever row."""
        ahead = index(_BEYOND // byte_width(self.stored.element))
        memref.prefetch(self._line, [arith.addi(self.place(row, column), ahead)], False, 2, True)

    def tile(self, kind: ir.Type, row: ir.Value, column: ir.Value) -> ir.Value:
        """A tile of rows from a row on, and of columns from a column on, as they are stored."""
        return x86.TileLoadOp(kind, self._line, [self.place(row, column)], stride=self.stride).result

    def scales(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """The scale of each row, where rows have one; none else."""
        return [memref.load(self._scales, [row]) for row in rows] if self.stored.scaled else []


class SlotTile:
    """Some `slots` of an expert, the last one in place of those that are missing.

    given  the memory of x, the weight, its scales, the order of slots and the workspace; where the thread's part of that
           begins, and the scratch memory of its stream; the first slot of the block and the last one, the tile's place in the
           block
    """

    def __init__(self, product: Any, slots: int, *given: ir.Value) -> None:
        self.slots, self.lanes = slots, product.lanes
        self.stored: Floats = product.stored
        self.streams: bool = product.machine.streams
        self.x, weight, scales, order, workspace, base, offset, slot, last, self.local = given
        self.weight = WeightRows(self.stored, weight, scales)
        self._product, self._order, self._first, self._last = product, order, arith.addi(slot, self.local), last
        self.tokens = [self.token(index(t)) for t in range(slots)]
        self.columns = memref.dim(self.x, index(1))
        self.sums = product.sums(workspace, offset, arith.addi(arith.subi(last, slot), index(1)))
        self.panel, self.lines = product.panel(workspace, base), product.lines(workspace, base)

    def token(self, number: ir.Value) -> ir.Value:
        """The row of x of a slot."""
        place = arith.minui(arith.addi(self._first, number), self._last)
        return place if self._product.in_order else self._product.token(load_index(self._order, place))


def _line(memory: ir.Value) -> ir.Value:
    """A memory of three dimensions as a line."""
    open_ = ir.ShapedType.get_dynamic_size()
    sizes = [memref.dim(memory, index(d)) for d in range(3)]
    total = arith.muli(arith.muli(sizes[0], sizes[1]), sizes[2])
    type_ = ir.MemRefType.get([open_], ir.MemRefType(memory.type).element_type)
    return memref.ReinterpretCastOp(type_, memory, [], [total], [], [0], [open_], [1]).result
