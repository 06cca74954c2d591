"""lower-convolve: lowers a `kernel.convolve` to loops over vectors of output pixels.

before   %y = "kernel.convolve"(%x, %w, %depth, %height, %width) ({epilogue}) {window = [1, 3, 3, ...], lanes = 16, ...}
after    scf.parallel (%task) = ...                       // images x groups x depths x tiles of 64 pixels x chunks of rows
           func.call @region_tile64(...)
         func.func private @region_tile64(...)
           for each block of channels:
             pack:    the pixels that the tile reads, surrounded by zeros, as [planes][phases][64 + halo] in the workspace
             for each row of the weight:
               scf.for %p ... iter_args(4 vectors)        // the row's nonzeros in the block
                 vector.fma(values[p], packed[shift of coordinates[p] ..], sums)
               the epilogue, and a compressed store: outputs between rows of the image are no pixels

If the window is pointwise, and images have known sizes and consist of whole tiles, nothing is packed. The few rows of a weight
would not read packed pixels often enough.

Planes are the channels; for volumes, each channel at each depth that taps read. If the sizes of images are dynamic, or if each
column of taps has its own phase (see window.py), a tile is a strip of few rows and columns. It has masked instead of expanding
loads and compressed stores. The kernel never makes an array of the size of x times the taps. Pixels have the same order in
lanes as in memory, so nothing is transposed. Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.kernel import integers
from gossamer.dialects.window import Window
from gossamer.passes.convolution.kblock_loop import KBlockRows
from gossamer.passes.convolution.pixels import Pixels, Seen, Tiles
from gossamer.passes.loops.inner_loop import InnerLoop
from gossamer.passes.loops.product import Operands, Product
from gossamer.passes.loops.queries import dims, walk
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    load_index,
    loop,
    narrowed,
    reserve_workspace,
    vector_of,
    widened,
    zeros,
)

_LINE = 64  # bytes of a cache line
_AVX512 = 64  # bytes of a vector of AVX-512


@dataclass(frozen=True)
class LowerConvolve:
    """Lower convolutions to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.convolve"):
            with op.location:
                _Convolution(op.opview).lower(module)


@dataclass(frozen=True)
class _Taps(KBlockRows):
    """Inner loops for a weight in blocks of channels x taps.

    packed   the pixels that a tile reads for one block, one-dimensional
    shifts   for each column of a block, its place in `packed`
    offsets  the places of the tile's vectors from there on
    """

    shifts: ir.Value
    offsets: list[int]

    def x(self, k: ir.Value) -> Any:
        at = load_index(self.shifts, k)
        return (vector.load(self.vec, self.packed, [arith.addi(at, index(offset))]) for offset in self.offsets)


@dataclass(frozen=True)
class _Whole(KBlockRows):
    """Inner loops for a weight whose columns are channels. They read the unpacked images (`packed`): the pixels from `first` on
    of image number `image`."""

    image: ir.Value
    first: ir.Value

    def x(self, k: ir.Value) -> Any:
        narrow = vector_of(self.vec.shape[0], ir.MemRefType(self.packed.type).element_type)
        for n in range(self.vectors):
            at = [self.image, k, arith.addi(self.first, index(n * self.vec.shape[0]))]
            yield widened(vector.load(narrow, self.packed, at), self.vec)


@dataclass(frozen=True)
class _Place:
    """The place of a tile: the numbers of its image and of its group of channels, and

    depth   the depth of its outputs in a volume; None for images
    number  its number among the tiles of an image
    """

    image: ir.Value
    group: ir.Value
    depth: ir.Value | None
    number: ir.Value


class _Convolution(Product):
    def __init__(self, op: Any) -> None:
        super().__init__(op, 1)
        self.window = Window.of(integers(op.window))
        self.numbers = [op.depth, op.height, op.width]
        self.channels = self.K // self.window.taps  # channels of a group
        self.blocks = -(-self.channels // self.window.channels)
        self.tile = self.window.vectors * self.lanes
        self.width = self.window.width(self.lanes)
        self.vec = vector_of(self.lanes, self.sum_type)
        self.unpacked = self.blocks == 1 and self.window.in_tiles(self.lanes)
        self.deep = not self.window.pointwise and not self.window.flat

    def lower(self, module: ir.Module) -> None:
        """Replaces the op by loops."""
        sizes = [self._panel * byte_width(self.sum_type), self._table * 4, self._sums * byte_width(self.sum_type)]
        self.offsets = [sum(-(-size // _LINE) * _LINE for size in sizes[:n]) for n in range(len(sizes) + 1)]
        workspace = self.offsets[-1] + _LINE
        reserve_workspace(module, workspace)
        self.by_tiles({self.tile: self.function(f"tile{self.tile}", self._emit)}, workspace)

    @property
    def _planes(self) -> int:
        """Number of planes that are packed for a block: for each channel, one for each depth that taps read."""
        return self.window.channels * self.window.kernel[0]

    @property
    def _panel(self) -> int:
        """Number of elements that are packed for a block."""
        return self._planes * len(self.window.phases) * self.width

    @property
    def _table(self) -> int:
        return 0 if self.window.pointwise else self.window.channels * self.window.taps

    @property
    def _sums(self) -> int:
        return self.M * self.tile if self.blocks > 1 else 0

    def all_tokens(self) -> ir.Value:
        """Returns the number of outputs, with each image rounded up to whole tiles."""
        tiles = self._tiles(self.numbers, self.storage.output)
        count = arith.muli(memref.dim(self.storage.output, index(0)), index(self.window.groups))
        if self.deep:
            count = arith.muli(count, tiles.results[0])
        return arith.muli(arith.muli(count, tiles.count()), index(self.tile))

    def work_before(self, row: ir.Value) -> ir.Value:
        return self.stored_before(row, self.blocks, 4)

    def _tiles(self, sizes: Sequence[ir.Value], out: ir.Value) -> Tiles:
        return Tiles.of(self.window, self.lanes, sizes, memref.dim(out, index(2)))

    def _place(self, first: ir.Value, tiles: Tiles) -> _Place:
        number, depth, group = arith.divui(first, index(self.tile)), None, index(0)
        number, tile = _split(number, tiles.count())
        if self.deep:
            number, depth = _split(number, tiles.results[0])
        if self.window.groups > 1:
            number, group = _split(number, index(self.window.groups))
        return _Place(number, group, depth, tile)

    def _emit(self, operands: Operands) -> None:
        tiles = self._tiles(operands.numbers, operands.memory.out)
        place = self._place(operands.first, tiles)
        read = [tiles.read(place.number, phase) for phase in self.window.phases]
        stored = tiles.stored(place.number)
        if place.depth is not None:
            behind = arith.muli(place.depth, arith.muli(*tiles.results[1:]))
            stored = [pixels.further(behind) for pixels in stored]
        packed, shifts, sums = self._scratch(operands)
        if self.unpacked:
            rest = (self.vec, self.window.vectors, self.M, 0, place.image, arith.muli(place.number, index(self.tile)))
            inner: InnerLoop = _Whole(operands.weight, operands.x, *rest)
        elif self.window.pointwise:
            inner = KBlockRows(operands.weight, packed, self.vec, self.window.vectors, self.M, 0)
        else:
            self._fill_table(shifts)
            offsets = self.window.offsets(self.lanes)
            inner = _Taps(operands.weight, packed, self.vec, self.window.vectors, self.M, 0, shifts, offsets)
        low, high = self._rows(operands, place.group)
        with loop(index(0), index(self.blocks), index(1)) as blocks:
            block = blocks.induction_variable
            if not self.unpacked:
                self._pack(operands.x, place, tiles, block, packed, read)
            with loop(low, high, index(1)) as rows:
                self._row(operands, place.image, block, rows.induction_variable, inner, sums, stored)

    def _rows(self, operands: Operands, group: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the rows of a group that a call computes."""
        if self.window.groups == 1:
            return operands.low, operands.high
        each = index(self.M // self.window.groups)
        low = arith.muli(group, each)
        return arith.maxui(operands.low, low), arith.minui(operands.high, arith.addi(low, each))

    def _scratch(self, operands: Operands) -> tuple[ir.Value, ir.Value, ir.Value]:
        shape = [self.window.channels, self.tile] if self.window.pointwise else [self._panel]
        types = [
            ir.MemRefType.get(shape, self.sum_type),
            ir.MemRefType.get([self._table], ir.IntegerType.get_signless(32)),
            ir.MemRefType.get([self._sums // self.tile, self.tile], self.sum_type),
        ]
        places = [arith.addi(operands.offset, index(offset)) for offset in self.offsets[:-1]]
        packed, shifts, sums = (memref.view(t, operands.workspace, at, []) for t, at in zip(types, places, strict=True))
        return packed, shifts, sums

    def _fill_table(self, shifts: ir.Value) -> None:
        """Fills the table of the places in the packed pixels that each column of a block reads."""
        i32, size = ir.IntegerType.get_signless(32), len(self.window.phases) * self.width
        places = self.window.places(self.lanes)
        with loop(index(0), index(self._planes), index(1)) as planes:
            plane = planes.induction_variable
            for tap, (phase, shift) in enumerate(places):
                place = self.window.phases.index(phase) * self.width + shift
                value = arith.addi(arith.muli(plane, index(size)), index(place))
                at = arith.addi(arith.muli(plane, index(len(places))), index(tap))
                memref.store(arith.index_cast(i32, value), shifts, [at])

    def _pack(
        self,
        x: ir.Value,
        place: _Place,
        tiles: Tiles,
        block: ir.Value,
        packed: ir.Value,
        read: list[Seen],
    ) -> None:
        low, deep = arith.muli(block, index(self.window.channels)), self.window.kernel[0]
        count = arith.minui(index(self.window.channels), arith.subi(index(self.channels), low))
        if self.window.groups > 1:
            low = arith.addi(low, arith.muli(place.group, index(self.channels)))
        narrow = vector_of(self.lanes, ir.MemRefType(x.type).element_type)
        with loop(index(0), arith.muli(count, index(deep)), index(1)) as planes:
            plane = planes.induction_variable
            channel, tap = _split(plane, index(deep)) if deep > 1 else (plane, index(0))
            source = [place.image, arith.addi(low, channel)]
            seen = self._seen(place, tiles, tap, read)
            counts = [self.window.vectors_of(phase, self.lanes) for phase in self.window.phases]
            for u in range(max(counts)):  # load all phases, then store: neighbouring ones become one load
                loaded = {p: seen[p][u].load(narrow, x, source) for p, count in enumerate(counts) if u < count}
                for p, value in loaded.items():
                    at = arith.addi(arith.muli(plane, index(len(read) * self.width)), index(p * self.width + u * self.lanes))
                    where = [plane, index(u * self.lanes)] if self.window.pointwise else [at]
                    vector.store(widened(value, self.vec), packed, where)

    def _seen(self, place: _Place, tiles: Tiles, tap: ir.Value, read: list[Seen]) -> list[Seen]:
        """Returns the pixels that a tap reads at its depth of a volume, with zeros in front of the volume and behind it."""
        if place.depth is None:
            return read
        window = self.window
        step, further, before = window.stride[0], window.dilation[0], window.before[0]
        depth = arith.addi(arith.muli(place.depth, index(step)), arith.muli(tap, index(further)))
        there = None
        if before or window.after[0]:
            depth = arith.subi(depth, index(before))
            there = arith.cmpi(arith.CmpIPredicate.ult, depth, tiles.images[0])  # negative numbers count as large ones
        begin = arith.muli(depth, arith.muli(*tiles.images[1:]))
        return [[pixels.further(begin, there) for pixels in phase] for phase in read]

    def _row(
        self,
        operands: Operands,
        image: ir.Value,
        block: ir.Value,
        row: ir.Value,
        inner: Any,
        sums: ir.Value,
        stored: list[Pixels],
    ) -> None:
        count = self.window.vectors
        places = [[row, index(v * self.lanes)] for v in range(count)]
        before = [zeros(self.vec)] * count
        if self.blocks > 1:
            begun = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, block, index(0)), [self.vec] * count, has_else=True)
            with ir.InsertionPoint(begun.then_block):
                scf.YieldOp([zeros(self.vec)] * count)
            with ir.InsertionPoint(begun.else_block):
                scf.YieldOp([vector.load(self.vec, sums, place) for place in places])
            before = list(begun.results)
        totals = inner.add(block, row, before)
        if self.blocks == 1:
            self._store(operands, [image, row], totals, stored)
            return
        last = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, block, index(self.blocks - 1)), has_else=True)
        with ir.InsertionPoint(last.then_block):
            self._store(operands, [image, row], totals, stored)
            scf.YieldOp([])
        with ir.InsertionPoint(last.else_block):
            for total, place in zip(totals, places, strict=True):
                vector.store(total, sums, place)
            scf.YieldOp([])

    def _store(self, operands: Operands, at: list[ir.Value], totals: list[ir.Value], stored: list[Pixels]) -> None:
        """Stores the sums of a row of the weight, through the epilogue, into the result."""
        out = vector_of(self.lanes, ir.MemRefType(operands.memory.out.type).element_type)
        compresses = self.lanes * byte_width(self.sum_type) == _AVX512
        for total, pixels in zip(totals, stored, strict=True):
            result = self.epilogue.whole(total, partial(_read, operands, at, pixels))
            pixels.store(narrowed(result, out), operands.memory.out, at, compresses)


def _split(number: ir.Value, count: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns quotient and remainder."""
    return arith.divui(number, count), arith.remui(number, count)


def _read(operands: Operands, at: list[ir.Value], pixels: Pixels, op: ir.Operation, type_: ir.VectorType) -> ir.Value:
    """Loads the epilogue's operand for the pixels of one channel of an image."""
    buffer = operands.memory.reads[op.results[0]]
    positions = dims(ir.AffineMapAttr(op.attributes["map"]).value)
    if positions == [0, 1, 2]:
        return pixels.load(type_, buffer, at)
    where = [at[1] if d == 1 else index(0) for d in positions]
    return vector.broadcast(type_, memref.load(buffer, where))
