"""lower-convolve-depthwise: lowers a `kernel.convolve_depthwise` to loops over strips of columns, and rows, of each channel.

before   %y = "kernel.convolve_depthwise"(%x, %w, %height, %width) ({epilogue}) {window = [3, 3, 1, 1, ...], lanes = 16}
after    scf.parallel (%plane) = ...                      // images x channels
           load the taps of the channel, and its operands of the epilogue, into all lanes
           for each strip of 16 columns
             for four rows of the result                  // for one row if a tap may be above or below the image
               vector.fma(maskedload(x, row and columns of a tap), tap, sum) for each tap
               the epilogue, and a masked store

Lanes for columns outside of the image are not loaded. With a stride of two, two loads give the pixels of two neighbouring taps:
every other lane is one tap's. Nothing is copied. Sizes are only known at run time, so layers of all sizes share one kernel.
Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.dialects.window import Window
from gossamer.passes.convolution.pixels import Integers, output_size
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.epilogue import Epilogue
from gossamer.passes.loops.queries import dims, walk
from gossamer.passes.loops.vectors import index, loop, mask_of, narrowed, parallel, vector_of, widened, zeros

_ROWS = 4  # rows of the result at a time


@dataclass(frozen=True)
class LowerConvolveDepthwise:
    """Lower depthwise convolutions to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.convolve_depthwise"):
            with op.location:
                _Depthwise(op.opview).lower()


class _Depthwise:
    def __init__(self, op: Any) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        self.window = Window.of(integers(op.window))
        if self.window.stride[2] > 2:
            raise CompileError(f"no depthwise convolution by columns {self.window.stride[2]} apart")
        self.x, self.w, self.out = buffer_of(op.x), buffer_of(op.w), self.storage.output
        self.height, self.width = op.height, op.width
        block = op.epilogue.blocks[0]
        self.vec = vector_of(ir.IntegerAttr(op.lanes).value, block.arguments[0].type)
        self.lanes = self.vec.shape[0]
        self.epilogue = Epilogue(block)
        self.reads = [o.operation for o in block.operations if o.operation.name == "kernel.read"]

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            self.rows, self.columns = (output_size(self.window, axis, n) for axis, n in enumerate((self.height, self.width), 1))
            channels = memref.dim(self.out, index(1))
            with parallel(arith.muli(memref.dim(self.out, index(0)), channels)) as plane:
                self._plane([arith.divui(plane, channels), arith.remui(plane, channels)])
        self.storage.erase()

    def _plane(self, at: list[ir.Value]) -> None:
        taps = [
            vector.broadcast(self.vec, widened(memref.load(self.w, [at[1], index(tap)]), self.vec.element_type))
            for tap in range(self.window.taps)
        ]
        known = {read: self._of_channel(read, at[1]) for read in self.reads if not _of_pixels(read)}
        first, last = self._inside()
        numbers = Integers(self.lanes)
        with loop(index(0), self.columns, index(self.lanes)) as strips:
            column = strips.induction_variable
            there = mask_of(self.lanes, arith.subi(self.columns, column))
            begins = [
                arith.addi(arith.muli(column, index(self.window.stride[2])), index(offset))
                for offset in _offsets(self.window, 2)
            ]
            masks = [[self._mask(numbers, begin, n) for n in range(self.window.stride[2])] for begin in begins]
            several = arith.addi(first, arith.muli(arith.divui(arith.subi(last, first), index(_ROWS)), index(_ROWS)))
            parts = ((index(0), first, 0), (first, several, _ROWS), (several, last, 1), (last, self.rows, 0))
            for low, high, count in parts:
                with loop(low, high, index(count or 1)) as rows:
                    row = rows.induction_variable
                    if count:
                        totals = self._sums(at, row, begins, masks, taps, count)
                    else:
                        totals = [self._sum_inside(at, row, begins, masks, taps)]
                    for further, total in enumerate(totals):
                        place = arith.addi(arith.muli(arith.addi(row, index(further)), self.columns), column)
                        self._store(total, [*at, place], there, known)

    def _inside(self) -> tuple[ir.Value, ir.Value]:
        """Returns the first row of the result without a tap above the image, and the next one that has a tap below it."""
        stride, before = self.window.stride[1], self.window.before[1]
        first = arith.minsi(index(-(-before // stride)), self.rows)
        reach = self.window.dilation[1] * (self.window.kernel[1] - 1) - before
        fitting = arith.floordivsi(arith.addi(self.height, index(stride - 1 - reach)), index(stride))
        return first, arith.maxsi(first, arith.minsi(fitting, self.rows))

    def _mask(self, numbers: Integers, begin: ir.Value, part: int) -> ir.Value:
        """Returns the lanes of the `part`-th vector from column `begin` on that are in the image."""
        lanes = arith.addi(numbers.splat(arith.index_cast(numbers.element, begin)), numbers.counting(part * self.lanes))
        width = numbers.splat(arith.index_cast(numbers.element, self.width))
        return arith.cmpi(arith.CmpIPredicate.ult, lanes, width)  # negative numbers count as large ones

    def _sum_inside(
        self,
        at: list[ir.Value],
        row: ir.Value,
        begins: Sequence[ir.Value],
        masks: Sequence[list[ir.Value]],
        taps: Sequence[ir.Value],
    ) -> ir.Value:
        """Returns the sums of a row of the result for which taps may be above or below the image.

        Each row of taps has its own sum, because multiply-adds of a single sum would wait for each other.
        """
        parts, across = list[ir.Value](), len(begins)
        for down, offset in enumerate(_offsets(self.window, 1)):
            source = arith.addi(arith.muli(row, index(self.window.stride[1])), index(offset))
            there = arith.cmpi(arith.CmpIPredicate.ult, source, self.height)
            choice = scf.IfOp(there, [self.vec], has_else=True)
            with ir.InsertionPoint(choice.then_block):
                total = zeros(self.vec)
                loaded = self._loaded([*at, source], begins, masks)
                for each, tap in zip(loaded, taps[down * across : (down + 1) * across], strict=True):
                    total = vector.fma(each, tap, total)
                scf.YieldOp([total])
            with ir.InsertionPoint(choice.else_block):
                scf.YieldOp([zeros(self.vec)])
            parts.append(choice.results[0])
        return reduce(arith.addf, parts)

    def _sums(
        self,
        at: list[ir.Value],
        row: ir.Value,
        begins: Sequence[ir.Value],
        masks: Sequence[list[ir.Value]],
        taps: Sequence[ir.Value],
        count: int,
    ) -> list[ir.Value]:
        """Returns the sums of `count` rows of the result whose taps are all in the image. Shared rows are loaded once."""
        stride, across = self.window.stride[1], len(begins)
        readers = dict[int, list[tuple[int, int]]]()
        for further in range(count):
            for down, offset in enumerate(_offsets(self.window, 1)):
                readers.setdefault(further * stride + offset, []).append((further, down * across))
        totals, first = [zeros(self.vec)] * count, arith.muli(row, index(stride))
        for offset in sorted(readers):
            loaded = self._loaded([*at, arith.addi(first, index(offset))], begins, masks)
            for n, each in enumerate(loaded):
                for further, tap in readers[offset]:
                    totals[further] = vector.fma(each, taps[tap + n], totals[further])
        return totals

    def _loaded(self, at: list[ir.Value], begins: Sequence[ir.Value], masks: Sequence[list[ir.Value]]) -> list[ir.Value]:
        """Returns the pixels that each tap of a row of taps reads from a row of the image, with zeros outside of it."""
        *plane, source = at
        first = arith.muli(source, self.width)
        narrow = vector_of(self.lanes, ir.MemRefType(self.x.type).element_type)
        stride, offsets = self.window.stride[2], _offsets(self.window, 2)
        found = dict[int, ir.Value]()
        for offset, begin, mine in zip(offsets, begins, masks, strict=True):
            if offset in found:
                continue
            start = arith.addi(first, begin)
            parts = [
                vector.maskedload(narrow, self.x, [*plane, arith.addi(start, index(n * self.lanes))], mask, zeros(narrow))
                for n, mask in enumerate(mine)
            ]
            for n in {other - offset for other in offsets} & set(range(stride)):
                every = [n + lane * stride for lane in range(self.lanes)]
                found[offset + n] = widened(reduce(lambda a, b: vector.shuffle(a, b, every), parts), self.vec)
        return [found[offset] for offset in offsets]

    def _of_channel(self, read: ir.Operation, channel: ir.Value) -> ir.Value:
        """Loads an operand of the epilogue for a channel, or for all channels, into all lanes."""
        where = [channel if d == 1 else index(0) for d in _dims(read)]
        return vector.broadcast(vector_of(self.lanes, read.results[0].type), memref.load(buffer_of(read.operands[0]), where))

    def _store(self, total: ir.Value, at: list[ir.Value], mask: ir.Value, known: dict[ir.Operation, ir.Value]) -> None:
        def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
            if op in known:
                return known[op]
            return vector.maskedload(type_, buffer_of(op.operands[0]), at, mask, zeros(type_))

        result = self.epilogue.whole(total, read)
        out = vector_of(self.lanes, ir.MemRefType(self.out.type).element_type)
        vector.maskedstore(self.out, at, mask, narrowed(result, out))


def _offsets(window: Window, axis: int) -> list[int]:
    """Returns the offset of each tap from the pixel at a multiple of the stride, along height or width."""
    return [tap * window.dilation[axis] - window.before[axis] for tap in range(window.kernel[axis])]


def _dims(read: ir.Operation) -> list[int | None]:
    return dims(ir.AffineMapAttr(read.attributes["map"]).value)


def _of_pixels(read: ir.Operation) -> bool:
    return _dims(read) == [0, 1, 2]
