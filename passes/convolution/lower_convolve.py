"""lower-convolve: a `kernel.convolve` becomes loops over vectors of output pixels.

before   %y = "kernel.convolve"(%x, %w) ({epilogue}) {window = [3, 3, 1, 1, ...], lanes = 16, reduction = 1}
after    scf.parallel (%task) = ...                       // images x tiles of 64 pixels x chunks of the weight's rows
           func.call @region_tile64(...)
         func.func private @region_tile64(...)
           for each block of channels:
             pack:    what the tile reads of them, with zeros around, into the workspace as [channels][phases][64 + halo]
             for each row of the weight:
               scf.for %p ... iter_args(4 vectors)        // the row's nonzeros in the block
                 vector.fma(values[p], packed[shift of coordinates[p] ..], sums)
               the epilogue, and a compressed store: outputs between rows of the image are no pixels

Nothing of the size of x times the taps is ever made. Pixels lie in lanes as they do in memory, so nothing is transposed. Runs
on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.kernel import integers
from gossamer.dialects.window import Window
from gossamer.passes.convolution.pixels import Pixels, pixels_of, tile_start
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
from gossamer.passes.weights.kblock_loop import KBlockRows

_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class LowerConvolve:
    """Lower convolutions to scf and vector."""

    name: ClassVar[str] = "lower-convolve"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.convolve"):
            with op.location:
                _Convolution(op.opview).lower(module)


@dataclass(frozen=True)
class _Taps(KBlockRows):
    """The rows of a weight in blocks of channels x taps, where `packed` holds what a tile reads of one block, all in a row."""

    shifts: ir.Value

    def x(self, k: ir.Value) -> Any:
        at = load_index(self.shifts, k)
        lanes = self.vec.shape[0]
        return (vector.load(self.vec, self.packed, [arith.addi(at, index(v * lanes))]) for v in range(self.vectors))


class _Convolution(Product):
    def __init__(self, op: Any) -> None:
        super().__init__(op, 1)
        self.window = Window.of(integers(op.window))
        self.channels = self.K // self.window.taps
        self.blocks = -(-self.channels // self.window.channels)
        self.tile = self.window.vectors * self.lanes
        self.width = self.window.width(self.lanes)
        self.vec = vector_of(self.lanes, self.sum_type)

    def lower(self, module: ir.Module) -> None:
        """Put loops in place of the op."""
        sizes = [self._panel * byte_width(self.sum_type), self._table * 4, self._sums * byte_width(self.sum_type)]
        self.offsets = [sum(-(-size // _LINE) * _LINE for size in sizes[:n]) for n in range(len(sizes) + 1)]
        workspace = self.offsets[-1] + _LINE
        reserve_workspace(module, workspace)
        self.by_tiles({self.tile: self.function(f"tile{self.tile}", self._emit)}, workspace)

    @property
    def _panel(self) -> int:
        """Elements of what is packed of a block."""
        return self.window.channels * len(self.window.phases) * self.width

    @property
    def _table(self) -> int:
        return 0 if self.window.pointwise else self.window.channels * self.window.taps

    @property
    def _sums(self) -> int:
        return self.M * self.tile if self.blocks > 1 else 0

    def all_tokens(self) -> ir.Value:
        """Outputs, as if all images ended with a whole tile."""
        images = memref.dim(self.storage.output, index(0))
        return arith.muli(arith.muli(images, self._tiles(self.storage.output)), index(self.tile))

    def work_before(self, row: ir.Value) -> ir.Value:
        return self.stored_before(row, self.blocks, 4)

    def _tiles(self, out: ir.Value) -> ir.Value:
        """Tiles of an image."""
        if self.window.pointwise:
            return arith.ceildivui(memref.dim(out, index(2)), index(self.tile))
        return index(-(-self.window.span // self.tile))

    def _emit(self, operands: Operands) -> None:
        number, tiles = arith.divui(operands.first, index(self.tile)), self._tiles(operands.memory.out)
        image, first = arith.divui(number, tiles), arith.muli(arith.remui(number, tiles), index(self.tile))
        start = tile_start(self.window, first, operands.memory.out)
        read = [
            [pixels_of(self.window, start, u * self.lanes, self.lanes, phase) for u in range(self.width // self.lanes)]
            for phase in self.window.phases
        ]
        stored = [pixels_of(self.window, start, v * self.lanes, self.lanes, None) for v in range(self.window.vectors)]
        packed, shifts, sums = self._scratch(operands)
        if self.window.pointwise:
            inner: InnerLoop = KBlockRows(operands.weight, packed, self.vec, self.window.vectors, self.M, 0)
        else:
            self._fill_table(shifts)
            inner = _Taps(operands.weight, packed, self.vec, self.window.vectors, self.M, 0, shifts)
        with loop(index(0), index(self.blocks), index(1)) as blocks:
            block = blocks.induction_variable
            self._pack(operands.x, image, block, packed, read)
            with loop(operands.low, operands.high, index(1)) as rows:
                self._row(operands, image, block, rows.induction_variable, inner, sums, stored)

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
        """Where in what is packed a column of a block reads."""
        i32, size = ir.IntegerType.get_signless(32), len(self.window.phases) * self.width
        with loop(index(0), index(self.window.channels), index(1)) as channels:
            channel = channels.induction_variable
            for tap, (phase, shift) in enumerate(self.window.places):
                place = self.window.phases.index(phase) * self.width + shift
                value = arith.addi(arith.muli(channel, index(size)), index(place))
                at = arith.addi(arith.muli(channel, index(self.window.taps)), index(tap))
                memref.store(arith.index_cast(i32, value), shifts, [at])

    def _pack(self, x: ir.Value, image: ir.Value, block: ir.Value, packed: ir.Value, read: list[list[Pixels]]) -> None:
        low = arith.muli(block, index(self.window.channels))
        count = arith.minui(index(self.window.channels), arith.subi(index(self.channels), low))
        narrow = vector_of(self.lanes, ir.MemRefType(x.type).element_type)
        with loop(index(0), count, index(1)) as channels:
            channel = channels.induction_variable
            source = [image, arith.addi(low, channel)]
            for p, phase in enumerate(read):
                for u, pixels in enumerate(phase):
                    loaded = widened(pixels.load(narrow, x, source), self.vec)
                    place = arith.addi(
                        arith.muli(channel, index(len(read) * self.width)), index(p * self.width + u * self.lanes)
                    )
                    where = [channel, index(u * self.lanes)] if self.window.pointwise else [place]
                    vector.store(loaded, packed, where)

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
        """The sums of a row of the weight, through the epilogue, into the result."""
        out = vector_of(self.lanes, ir.MemRefType(operands.memory.out.type).element_type)
        for total, pixels in zip(totals, stored, strict=True):
            result = self.epilogue.whole(total, partial(_read, operands, at, pixels))
            pixels.store(narrowed(result, out), operands.memory.out, at)


def _read(operands: Operands, at: list[ir.Value], pixels: Pixels, op: ir.Operation, type_: ir.VectorType) -> ir.Value:
    """What the epilogue reads for the pixels of one channel of an image."""
    buffer = operands.memory.reads[op.results[0]]
    positions = dims(ir.AffineMapAttr(op.attributes["map"]).value)
    if positions == [0, 1, 2]:
        return pixels.load(type_, buffer, at)
    where = [at[1] if d == 1 else index(0) for d in positions]
    return vector.broadcast(type_, memref.load(buffer, where))
