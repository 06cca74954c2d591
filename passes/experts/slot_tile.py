"""The base of functions for some slots of an expert and some rows of its weight: operands, and the memory of sums."""

from collections.abc import Callable, Sequence
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector, x86

from gossamer.passes.experts.stored_weights import Floats
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop

_BEYOND = 16 << 10  # how many bytes ahead `fetch_beyond` prefetches


class WeightRows:
    """The rows of the weights of all experts, as one line of memory."""

    def __init__(self, stored: Floats, weight: ir.Value, scales: ir.Value) -> None:
        self.stored = stored
        self.stride, self._groups = memref.dim(weight, index(2)), memref.dim(scales, index(2))
        self._line, self._scales = _line(weight), _line(scales)

    def read(self, row: ir.Value, column: ir.Value, left: ir.Value | None = None) -> list[ir.Value]:
        """Reads vectors of a row from a column on; if `left` is given, only so many columns exist. Applies scales of groups."""
        scale = None
        if self.stored.group:
            group = arith.addi(arith.muli(row, self._groups), arith.divui(column, index(self.stored.group)))
            scale = vector.broadcast(self.stored.vec, memref.load(self._scales, [group]))
        return self.stored.weights(self._line, self.place(row, column), scale, left)

    def fetch(self, row: ir.Value, column: ir.Value, streams: bool = False) -> None:
        """Prefetches a cache line of a row into the second-level cache, or, with `streams`, for a single use past it."""
        memref.prefetch(self._line, [self.place(row, column)], False, 0 if streams else 2, True)

    def fetch_at(self, place: ir.Value) -> None:
        """Prefetches a cache line at a place in the line of all rows."""
        memref.prefetch(self._line, [place], False, 2, True)

    def place(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """Returns the place of a column of a row in the line of all rows."""
        return arith.addi(arith.muli(row, self.stride), self.stored.place(column))

    def fetch_beyond(self, row: ir.Value, column: ir.Value) -> None:
        """Prefetches the cache line that lies some KB further in memory, in whatever row."""
        ahead = index(_BEYOND // byte_width(self.stored.element))
        memref.prefetch(self._line, [arith.addi(self.place(row, column), ahead)], False, 2, True)

    def tile(self, kind: ir.Type, row: ir.Value, column: ir.Value) -> ir.Value:
        """Loads an AMX tile of rows from a row on, and of columns from a column on."""
        return x86.TileLoadOp(kind, self._line, [self.place(row, column)], stride=self.stride).result

    def scales(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """Returns the scale of each row; an empty list if rows have none."""
        return [memref.load(self._scales, [row]) for row in rows] if self.stored.scaled else []


class SlotTile:
    """Some `slots` of an expert. Slots past the last one repeat it.

    given  x, the weight, its scales, the order of slots and the workspace; the begin of the thread's part of the workspace, and
           of the scratch memory of its stream; the first and the last slot of the block; the tile's place in the block
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
        """Returns the row of x for a slot."""
        place = arith.minui(arith.addi(self._first, number), self._last)
        return place if self._product.in_order else self._product.token(load_index(self._order, place))

    def pack(
        self, low: ir.Value, depth: ir.Value, memory: ir.Value, place: Callable[[ir.Value, int, int], list[ir.Value]]
    ) -> None:
        """Copies the columns [low, low + depth) of the tokens into scratch memory, as vectors that a step multiplies.

        place  the place of a vector there: by its column (counted from `low`), the slot, and its number in the step
        """
        one = self.stored.columns
        whole = arith.subi(depth, arith.remui(depth, index(one)))
        for first, end, masked in ((index(0), whole, False), (whole, depth, True)):
            with loop(first, end, index(one)) as columns:
                column = columns.induction_variable
                left = arith.subi(end, column) if masked else None
                for t, token in enumerate(self.tokens):
                    for n, value in enumerate(self.stored.x(self.x, token, arith.addi(low, column), left)):
                        vector.store(value, memory, place(column, t, n))


def _line(memory: ir.Value) -> ir.Value:
    """Returns a memory of three dimensions as one line."""
    open_ = ir.ShapedType.get_dynamic_size()
    sizes = [memref.dim(memory, index(d)) for d in range(3)]
    total = arith.muli(arith.muli(sizes[0], sizes[1]), sizes[2])
    type_ = ir.MemRefType.get([open_], ir.MemRefType(memory.type).element_type)
    return memref.ReinterpretCastOp(type_, memory, [], [total], [], [0], [open_], [1]).result
