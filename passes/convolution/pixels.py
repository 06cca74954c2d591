"""Which pixels of an image the lanes of a vector are, and how they are read and stored.

Lanes are consecutive outputs of a `Window`, of which some are no pixels: those between the rows of an image. Those that are
lie behind each other in memory, so a load expands and a store compresses; where a stride lies between them, they are gathered.
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.dialects.window import Pair, Window
from gossamer.passes.loops.vectors import index, mask_of, vector_of, zeros

_FAR = 0x7FFFFFFF


@dataclass(frozen=True)
class Pixels:
    """The pixels of a vector.

    mask     which lanes are pixels
    start    the first of them
    indices  of all of them, where they do not lie behind each other
    whole    whether the pixels are the first lanes
    """

    mask: ir.Value
    start: ir.Value
    indices: ir.Value | None = None
    whole: bool = False

    def load(self, type_: ir.VectorType, images: ir.Value, at: list[ir.Value]) -> ir.Value:
        """images[*at, pixels], zeros in lanes that are none."""
        if self.indices is not None:
            return vector.gather(type_, images, [*at, index(0)], self.indices, self.mask, zeros(type_))
        load: Any = vector.maskedload if self.whole else vector.expandload
        return load(type_, images, [*at, self.start], self.mask, zeros(type_))

    def store(self, values: ir.Value, images: ir.Value, at: list[ir.Value]) -> None:
        """images[*at, pixels] = values"""
        store: Any = vector.maskedstore if self.whole else vector.compressstore
        store(images, [*at, self.start], self.mask, values)


def tile_start(window: Window, first: ir.Value, out: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The first output of a tile, and for a pointwise window how many there are from it on."""
    left = arith.subi(memref.dim(out, index(2)), first) if window.pointwise else first
    return first, left


def pixels_of(window: Window, start: tuple[ir.Value, ir.Value], offset: int, lanes: int, phase: Pair | None) -> Pixels:
    """The pixels of the outputs from `start` + `offset` on; of the input where they read a phase of it."""
    first, left = start
    if window.pointwise:
        behind = index(offset)
        mask = mask_of(lanes, arith.subi(arith.maxui(left, behind), behind))
        return Pixels(mask, arith.addi(first, behind), whole=True)
    numbers = Integers(lanes)
    outputs = arith.addi(numbers.splat(arith.index_cast(numbers.element, first)), numbers.counting(offset))
    row, column = arith.divui(outputs, numbers.of(window.row)), arith.remui(outputs, numbers.of(window.row))
    height, width = window.output(*window.images) if phase is None else window.images
    if phase is not None:
        row = arith.addi(arith.muli(row, numbers.of(window.stride[0])), numbers.of(phase[0] - window.before[0]))
        column = arith.addi(arith.muli(column, numbers.of(window.stride[1])), numbers.of(phase[1] - window.before[1]))
    below = arith.CmpIPredicate.ult  # negative numbers are large ones
    mask = arith.andi(arith.cmpi(below, row, numbers.of(height)), arith.cmpi(below, column, numbers.of(width)))
    places = arith.addi(arith.muli(row, numbers.of(width)), column)
    if phase is not None and window.stride != (1, 1):
        return Pixels(mask, index(0), arith.select(mask, places, numbers.of(0)))
    lowest = vector.reduction(numbers.element, vector.CombiningKind.MINUI, arith.select(mask, places, numbers.of(_FAR)))
    none = arith.cmpi(arith.CmpIPredicate.eq, lowest, arith.constant(numbers.element, _FAR))
    at = arith.select(none, arith.constant(numbers.element, 0), lowest)
    return Pixels(mask, arith.index_cast(ir.IndexType.get(), at))


class Integers:
    """Vectors of 32-bit integers."""

    def __init__(self, lanes: int) -> None:
        self.element = ir.IntegerType.get_signless(32)
        self.type = vector_of(lanes, self.element)
        self.lanes = lanes

    def of(self, value: int) -> ir.Value:
        """One number in all lanes."""
        return arith.constant(self.type, ir.DenseElementsAttr.get_splat(self.type, ir.IntegerAttr.get(self.element, value)))

    def splat(self, value: ir.Value) -> ir.Value:
        """One value in all lanes."""
        return vector.broadcast(self.type, value)

    def counting(self, first: int) -> ir.Value:
        """first, first + 1, ..."""
        text = ", ".join(str(first + lane) for lane in range(self.lanes))
        return arith.constant(self.type, ir.Attribute.parse(f"dense<[{text}]> : {self.type}"))
