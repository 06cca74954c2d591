"""Maps the lanes of a vector to pixels of an image, and loads and stores them. Lanes are consecutive outputs of a `Window`.

If images have known sizes, some lanes are no pixels: those between the rows of an image. The pixels of the other lanes are
contiguous in memory, so a load expands and a store compresses. With AVX-512 a store compresses in a register, because the
compressing store takes more than a hundred cycles on AMD's Zen 4. With a stride of two, every other loaded pixel is used; with
a larger one, pixels are gathered. In other windows, lanes are neighbouring pixels of a row, or past its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, llvm, vector

from gossamer.dialects.window import Pair, Window
from gossamer.passes.loops.vectors import byte_width, index, mask_of, vector_of, zeros

_FAR = 0x7FFFFFFF  # greater than any place
_BELOW = arith.CmpIPredicate.ult  # negative numbers count as large ones


@dataclass(frozen=True)
class Pixels:
    """The pixels of a vector.

    mask     the lanes that are pixels
    start    the place of the first pixel, or of the first lane if `as_lie`
    indices  the places of all lanes from `start` on, if pixels are not contiguous; else None
    as_lie   whether all lanes are contiguous in memory, so that loads and stores are masked
    """

    mask: ir.Value
    start: ir.Value
    indices: ir.Value | None = None
    as_lie: bool = False

    def load(self, type_: ir.VectorType, images: ir.Value, at: list[ir.Value]) -> ir.Value:
        """Loads images[*at, pixels], with zeros in other lanes."""
        if self.indices is not None:
            return vector.gather(type_, images, [*at, self.start], self.indices, self.mask, zeros(type_))
        load: Any = vector.maskedload if self.as_lie else vector.expandload
        return load(type_, images, [*at, self.start], self.mask, zeros(type_))

    def store(self, values: ir.Value, images: ir.Value, at: list[ir.Value], compresses: bool) -> None:
        """Stores values into images[*at, pixels]. `compresses` says whether the target compresses registers."""
        if self.as_lie or not compresses:
            store: Any = vector.maskedstore if self.as_lie else vector.compressstore
            store(images, [*at, self.start], self.mask, values)
            return
        count = vector.reduction(
            ir.IntegerType.get_signless(32), vector.CombiningKind.ADD, arith.extui(Integers(_lanes(values)).type, self.mask)
        )
        first = mask_of(_lanes(values), arith.index_cast(ir.IndexType.get(), count))
        vector.maskedstore(images, [*at, self.start], first, _compressed(values, self.mask))

    def further(self, offset: ir.Value, there: ir.Value | None = None) -> "Pixels":
        """Returns the same pixels of an image that lies `offset` pixels further, or none unless it is `there`."""
        mask = self.mask if there is None else arith.select(there, self.mask, zeros(ir.VectorType(self.mask.type)))
        return replace(self, mask=mask, start=arith.addi(self.start, offset))


@dataclass(frozen=True)
class EveryOther:
    """The pixels of a vector that has a stride in the rows of the image. They are loaded with the pixels between them, and then
    selected. A vector may have pixels of several rows.

    rows    for each row of the image: the place of its first vector, as if all lanes were in this row, and for each vector the
            lanes that are
    part    the first lane that is selected
    """

    rows: Sequence[tuple[ir.Value, Sequence[ir.Value]]]
    part: int

    def load(self, type_: ir.VectorType, images: ir.Value, at: list[ir.Value]) -> ir.Value:
        """Loads images[*at, pixels], with zeros in other lanes."""
        lanes, count = type_.shape[0], len(self.rows[0][1])
        vectors = [zeros(type_)] * count
        for start, masks in self.rows:
            for n, mask in enumerate(masks):
                place = [*at, arith.addi(start, index(n * lanes))]
                vectors[n] = vector.maskedload(type_, images, place, mask, vectors[n])
        if count == 1:
            return vectors[0]
        return vector.shuffle(*vectors, [self.part + count * lane for lane in range(lanes)])

    def further(self, offset: ir.Value, there: ir.Value | None = None) -> "EveryOther":
        """Returns the same pixels of an image that lies `offset` pixels further, or none unless it is `there`."""

        def seen(mask: ir.Value) -> ir.Value:
            return mask if there is None else arith.select(there, mask, zeros(ir.VectorType(mask.type)))

        return replace(self, rows=[(arith.addi(start, offset), [*map(seen, masks)]) for start, masks in self.rows])


Seen = Sequence[Pixels | EveryOther]
"""The pixels that a tile reads, vector by vector."""


def _lanes(values: ir.Value) -> int:
    return int(ir.VectorType(values.type).shape[0])


def _compressed(values: ir.Value, mask: ir.Value) -> ir.Value:
    """Moves the lanes of the mask to the front."""
    given = ir.VectorType(values.type)
    lanes, bits = _lanes(values), byte_width(given.element_type) * 8
    integers = vector_of(lanes, ir.IntegerType.get_signless(bits))
    whole = vector.bitcast(integers, values)
    name = f"llvm.experimental.vector.compress.v{lanes}i{bits}"
    return vector.bitcast(given, llvm.call_intrinsic(integers, name, [whole, mask, whole], [], []))


@dataclass(frozen=True)
class Tiles:
    """The tiles of outputs into which images are cut.

    images   depth, height and width of the images
    results  depth, height and width of the result; for a pointwise window only the number of pixels
    """

    window: Window
    lanes: int
    images: Sequence[ir.Value]
    results: Sequence[ir.Value]

    @classmethod
    def of(cls, window: Window, lanes: int, images: Sequence[ir.Value], pixels: ir.Value) -> "Tiles":
        """Returns the tiles of a window, for images of this size and results of `pixels` pixels."""
        if window.pointwise:
            return _Pieces(window, lanes, images, [pixels])
        images = [index(known) if known else given for known, given in zip(window.images, images, strict=True)]
        results = [output_size(window, axis, size) for axis, size in enumerate(images)]
        return (_Strips if window.strip else _Rows)(window, lanes, images, results)

    def count(self) -> ir.Value:
        """Returns the number of tiles of an image."""
        raise NotImplementedError

    def read(self, number: ir.Value, phase: Pair) -> Seen:
        """Returns the pixels of a phase that a tile reads."""
        raise NotImplementedError

    def stored(self, number: ir.Value) -> list[Pixels]:
        """Returns the outputs of a tile."""
        raise NotImplementedError


class _Pieces(Tiles):
    """Tiles of pointwise windows, which ignore the rows of an image."""

    def count(self) -> ir.Value:
        return arith.ceildivui(self.results[0], index(self.window.vectors * self.lanes))

    def read(self, number: ir.Value, phase: Pair) -> list[Pixels]:
        return self.stored(number)

    def stored(self, number: ir.Value) -> list[Pixels]:
        first = arith.muli(number, index(self.window.vectors * self.lanes))
        left = arith.subi(self.results[0], first)
        return [self._pixels(first, left, index(v * self.lanes)) for v in range(self.window.vectors)]

    def _pixels(self, first: ir.Value, left: ir.Value, offset: ir.Value) -> Pixels:
        mask = mask_of(self.lanes, arith.subi(arith.maxui(left, offset), offset))
        return Pixels(mask, arith.addi(first, offset), as_lie=True)


class _Rows(Tiles):
    """Tiles of images of known sizes. A tile is a row of outputs that may span rows of the image."""

    def count(self) -> ir.Value:
        return index(-(-self.window.span // (self.window.vectors * self.lanes)))

    def read(self, number: ir.Value, phase: Pair) -> Seen:
        window = self.window
        pixels = self._pixels if window.stride[1:] == (1, 1) or window.gathers(self.lanes) else self._every_other
        return [pixels(number, u * self.lanes, phase) for u in range(window.width(self.lanes) // self.lanes)]

    def stored(self, number: ir.Value) -> list[Pixels]:
        return [self._pixels(number, offset, None) for offset in self.window.offsets(self.lanes)]

    def _pixels(self, number: ir.Value, offset: int, phase: Pair | None) -> Pixels:
        """Returns the pixels of a vector of outputs, or, with a phase, those of the input that it reads."""
        window, numbers = self.window, Integers(self.lanes)
        first = arith.muli(number, index(window.vectors * self.lanes))
        outputs = arith.addi(numbers.splat(arith.index_cast(numbers.element, first)), numbers.counting(offset))
        width = window.row(self.lanes)
        row, column = arith.divui(outputs, numbers.of(width)), arith.remui(outputs, numbers.of(width))
        _, height, width = window.output(*window.images) if phase is None else window.images
        if phase is not None:
            row = arith.addi(arith.muli(row, numbers.of(window.stride[1])), numbers.of(phase[0] - window.before[1]))
            column = arith.addi(arith.muli(column, numbers.of(window.stride[2])), numbers.of(phase[1] - window.before[2]))
        mask = arith.andi(arith.cmpi(_BELOW, row, numbers.of(height)), arith.cmpi(_BELOW, column, numbers.of(width)))
        places = arith.addi(arith.muli(row, numbers.of(width)), column)
        if phase is not None and window.stride[1:] != (1, 1):
            return Pixels(mask, index(0), arith.select(mask, places, numbers.of(0)))
        lowest = vector.reduction(numbers.element, vector.CombiningKind.MINUI, arith.select(mask, places, numbers.of(_FAR)))
        none = arith.cmpi(arith.CmpIPredicate.eq, lowest, arith.constant(numbers.element, _FAR))
        at = arith.select(none, arith.constant(numbers.element, 0), lowest)
        return Pixels(mask, arith.index_cast(ir.IndexType.get(), at))

    def _every_other(self, number: ir.Value, offset: int, phase: Pair) -> EveryOther:
        """Returns the pixels of the input that a vector of outputs reads, with their neighbours in the same rows."""
        window, numbers = self.window, Integers(self.lanes)
        (_, height, width), (high, wide), row = window.images, window.stride[1:], window.row(self.lanes)
        first = arith.addi(arith.muli(number, index(window.vectors * self.lanes)), index(offset))
        line, column = arith.divui(first, index(row)), arith.remui(first, index(row))
        rows = list[tuple[ir.Value, Sequence[ir.Value]]]()
        for k in range(window.rows_of(self.lanes)):
            y = arith.addi(arith.muli(arith.addi(line, index(k)), index(high)), index(phase[0] - window.before[1]))
            begin = arith.muli(arith.subi(column, index(k * row)), index(wide))  # in the padded row
            there, masks = arith.cmpi(_BELOW, y, index(height)), list[ir.Value]()
            for n in range(wide):
                places = arith.addi(numbers.splat(arith.index_cast(numbers.element, begin)), numbers.counting(n * self.lanes))
                inside = arith.cmpi(_BELOW, places, numbers.of(wide * row))
                seen = arith.cmpi(_BELOW, arith.subi(places, numbers.of(window.before[2])), numbers.of(width))
                mask = arith.andi(inside, seen)
                masks.append(arith.select(there, mask, zeros(ir.VectorType(mask.type))))
            start = arith.addi(arith.muli(y, index(width)), arith.subi(begin, index(window.before[2])))
            rows.append((start, masks))
        return EveryOther(rows, phase[1])


class _Strips(Tiles):
    """Tiles that are strips, some rows of some vectors: for images of dynamic sizes, or if columns of taps have own phases."""

    @property
    def strip(self) -> Pair:
        """Rows and columns of a tile."""
        down, across = self.window.strip or (1, 1)
        return down, across * self.lanes

    def count(self) -> ir.Value:
        down, across = (arith.ceildivui(n, index(step)) for n, step in zip(self.results[1:], self.strip, strict=True))
        return arith.muli(down, across)

    def read(self, number: ir.Value, phase: Pair) -> Seen:
        row, column = self._begin(number)
        high, wide = self.window.stride[1:]
        top = arith.addi(arith.muli(row, index(high)), index(phase[0] - self.window.before[1]))
        left = arith.addi(arith.muli(column, index(wide)), index(phase[1] - self.window.before[2]))
        length = self.window.row(self.lanes)
        rows = [arith.addi(top, index(i * high)) for i in range(self.window.width(self.lanes) // length)]
        columns = [arith.addi(left, index(u * wide)) for u in range(0, length, self.lanes)]
        if wide == 1 or self.window.gathers(self.lanes):
            return self._all(rows, columns, self.images, wide)
        return [self._every_other(row, column, wide) for row in rows for column in columns]

    def stored(self, number: ir.Value) -> list[Pixels]:
        row, column = self._begin(number)
        down, across = self.strip
        rows = [arith.addi(row, index(i)) for i in range(down)]
        columns = [arith.addi(column, index(u)) for u in range(0, across, self.lanes)]
        return self._all(rows, columns, self.results, 1)

    def _begin(self, number: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the first row and column of the outputs of a tile."""
        down, across = self.strip
        beside = arith.ceildivui(self.results[2], index(across))
        strip, place = arith.divui(number, beside), arith.remui(number, beside)
        return arith.muli(strip, index(down)), arith.muli(place, index(across))

    def _every_other(self, row: ir.Value, column: ir.Value, step: int) -> EveryOther:
        """Returns a vector of every `step`-th pixel of a row, from a column on."""
        numbers, masks = Integers(self.lanes), list[ir.Value]()
        (_, height, width) = self.images
        there = arith.cmpi(_BELOW, row, height)
        for n in range(step):
            begin = arith.index_cast(numbers.element, column)
            places = arith.addi(numbers.splat(begin), numbers.counting(n * self.lanes))
            mask = arith.cmpi(_BELOW, places, numbers.splat(arith.index_cast(numbers.element, width)))
            masks.append(arith.select(there, mask, zeros(ir.VectorType(mask.type))))
        return EveryOther([(arith.addi(arith.muli(row, width), column), masks)], 0)

    def _all(self, rows: list[ir.Value], columns: list[ir.Value], sizes: Sequence[ir.Value], step: int) -> list[Pixels]:
        """Returns a vector of every `step`-th pixel for each of these rows and first columns."""
        numbers, found = Integers(self.lanes), list[Pixels]()
        steps = numbers.counting(0, step)
        width = numbers.splat(arith.index_cast(numbers.element, sizes[2]))
        lanes = [arith.addi(numbers.splat(arith.index_cast(numbers.element, column)), steps) for column in columns]
        masks = [arith.cmpi(_BELOW, each, width) for each in lanes]
        for row in rows:
            there, start = arith.cmpi(_BELOW, row, sizes[1]), arith.muli(row, sizes[2])
            for column, each, mask in zip(columns, lanes, masks, strict=True):
                if step == 1:
                    pixels = Pixels(mask, arith.addi(start, column), as_lie=True)
                else:
                    pixels = Pixels(mask, start, arith.select(mask, each, numbers.of(0)))
                found.append(pixels.further(index(0), there))
        return found


def output_size(window: Window, axis: int, size: ir.Value) -> ir.Value:
    """Returns the size of the result along depth, height or width."""
    more = window.before[axis] + window.after[axis] - window.dilation[axis] * (window.kernel[axis] - 1) - 1
    steps = arith.floordivsi(arith.addi(size, index(more)), index(window.stride[axis]))
    return arith.addi(steps, index(1))


class Integers:
    """Makes vectors of 32-bit integers."""

    def __init__(self, lanes: int) -> None:
        self.element = ir.IntegerType.get_signless(32)
        self.type = vector_of(lanes, self.element)
        self.lanes = lanes

    def of(self, value: int) -> ir.Value:
        """Returns one number in all lanes."""
        return arith.constant(self.type, ir.DenseElementsAttr.get_splat(self.type, ir.IntegerAttr.get(self.element, value)))

    def splat(self, value: ir.Value) -> ir.Value:
        """Returns one value in all lanes."""
        return vector.broadcast(self.type, value)

    def counting(self, first: int, step: int = 1) -> ir.Value:
        """Returns first, first + step, ..."""
        text = ", ".join(str(first + lane * step) for lane in range(self.lanes))
        return arith.constant(self.type, ir.Attribute.parse(f"dense<[{text}]> : {self.type}"))
