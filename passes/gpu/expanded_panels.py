"""Frame of products with few tokens that load a sparse weight, expand it in registers, and multiply it as a dense one.

// a thread block computes 32 features; each of its 8 warps multiplies every eighth panel, 64 bytes of each row along K
each warp: start to copy its first two panels: masks, offsets, values of w; x[16 tokens][64 bytes]
scf.for %panel step 8 iter_args(2 x 2 x 4 sums)
  start to copy the panel after the next; wait for the panel's own copy
  each lane: its elements of w, zeros included          // ExpandedPanels.elements, in a subclass
  nvgpu.ldmatrix of x; nvvm.mma.sync
add up the warps' sums in shared memory; store them through the epilogue into y

With few tokens, loading the weight from memory takes most of the time. Lanes load a tile's elements from the packed values into
the registers that tensor cores read (as SpInfer does: Fan et al., EuroSys 2025; the idea is Flash-LLM's: Xia et al., VLDB
2023). Warps share nothing before the end, so each one waits only for its own copies. Tokens past the last and columns beyond K
are zeros, and are not read.
"""

from functools import partial
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, memref, scf, vector

from gossamer.dialects.gpu_packings import Fragments
from gossamer.dialects.launch import Launch
from gossamer.passes.framework.family import Family
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.gpu_threads import WARP, below, divmod_by, load, shared, store, sync_warp, when, widest
from gossamer.passes.loops.product import products
from gossamer.passes.loops.tensor_core import commit, copy_async, load_matrices, multiply_add, wait
from gossamer.passes.loops.vectors import added, byte_width, index, load_index, loop, rolled, vector_of, zeros

TOKENS = (16, 8)
ROWS = Fragments.ROWS
_RESIDENT = 3  # blocks of a multiprocessor at once: as many as fit GPUs with a large shared memory
_LINE = 64  # bytes of a row of x in a panel
_PIECE = 16  # bytes that a lane copies at once
_WARPS = 8
_HEIGHTS, _DEPTHS = ROWS // 16, _LINE // 32  # tiles of a panel
_SLOTS = 3  # panels of a warp in shared memory: one that is multiplied, two that are being copied
_AT_ONCE = 2  # copies of pieces of x that a lane begins one after the other
_APART = ROWS + 4  # distance of neighbouring tokens' sums in shared memory, such that no two lanes store to one bank


class ExpandedPanels:
    """Emits the body of one kernel. A thread block computes the 32 rows of the operands' chunk.

    Subclasses set `stored`, the packing of the weight, and `lower`, the bits of a mask below the lane's own.
    """

    stored: ClassVar[type[Fragments]]
    lower: ir.Value

    def __init__(self, spmm: GpuProduct, operands: Operands) -> None:
        stored = self.stored
        self.spmm, self.operands = spmm, operands
        self.positions, *self.sources = operands.weight
        self.count, self.warp = operands.launch.tokens, operands.warp
        self.i32, i16 = (ir.IntegerType.get_signless(width) for width in (32, 16))
        self.chunk = _PIECE // byte_width(spmm.element)
        x, values, masks = self.count * _LINE, _value_bytes(spmm, stored), _masks(stored)
        self.x = _slots(0, x, spmm.element)
        self.values, self.words = (_slots(x, values, element) for element in (spmm.element, self.i32))
        self.masks = _slots(x + values, 4 * masks, self.i32)
        self.offsets = _slots(x + values + 4 * masks, 2 * masks, i16)
        self.panels = -(-spmm.K // stored.COLUMNS)
        self.first_panel = arith.muli(operands.chunk, index(self.panels))
        self.widths = self.count // 8
        self.sums = vector_of(4, spmm.sum_type)

    @classmethod
    def lower_all(cls, module: ir.Module, family: Family) -> None:
        """Replaces all products of a family by kernels."""
        for op in products(module, family.name):
            with op.location:
                spmm = GpuProduct(op, cls.tile())
                launches = {tokens: launch(spmm, cls.stored, tokens) for tokens in TOKENS}
                spmm.kernels(launches, partial(cls._emit, spmm), _RESIDENT)

    @classmethod
    def _emit(cls, spmm: GpuProduct, operands: Operands) -> None:
        cls(spmm, operands).emit()

    @classmethod
    def tile(cls) -> list[int]:
        """Returns the tile: [tokens, rows of the weight, columns of K]."""
        return [TOKENS[0], cls.stored.ROWS, cls.stored.COLUMNS]

    def first_mask(self, tile: int) -> ir.Value:
        """Returns the number of this lane's first mask of a tile; it reads four masks from there on, one for each quarter."""
        raise NotImplementedError

    def elements(self, slot: ir.Value, mask: ir.Value, place: ir.Value) -> ir.Value:
        """Loads this lane's elements of a quarter of a tile, whose values begin at `place` in the slot."""
        raise NotImplementedError

    def expanded(self, slot: ir.Value, tile: int) -> list[ir.Value]:
        """Returns this lane's elements of the four quarters of a tile of w, as `multiply_add` takes them."""
        at = [self.warp, slot, self.first_mask(tile)]
        masks = load(vector_of(4, self.i32), self.masks, at)
        offsets = load(vector_of(4, ir.IntegerType.get_signless(16)), self.offsets, at)
        found = []
        for quarter in range(4):
            mask = vector.extract(masks, [], [quarter])
            place = arith.addi(arith.extui(self.i32, vector.extract(offsets, [], [quarter])), self._before(mask))
            found.append(self.elements(slot, mask, place))
        return found

    def emit(self) -> None:
        """Emits the whole body."""
        panels = [arith.addi(self.warp, index(slot * _WARPS)) for slot in range(_SLOTS)]
        for slot, panel in enumerate(panels[:-1]):
            self._copy(panel, index(slot), *self._bounds(panel))
        start = [index(0), *self._bounds(panels[-1]), *[zeros(self.sums)] * (_HEIGHTS * self.widths)]
        with loop(self.warp, index(self.panels), index(_WARPS), start) as steps:
            slot, begin, end, *sums = steps.inner_iter_args
            sync_warp()  # all lanes must have read the slot that is filled next
            is_first = arith.cmpi(arith.CmpIPredicate.eq, slot, index(0))
            free = arith.select(is_first, index(_SLOTS - 1), arith.subi(slot, index(1)))
            later = arith.addi(steps.induction_variable, index((_SLOTS - 1) * _WARPS))
            self._copy(later, free, begin, end)
            bounds = self._bounds(arith.addi(later, index(_WARPS)))
            wait(_SLOTS - 1)
            sync_warp()
            sums = self._multiply(slot, sums)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, slot, index(_SLOTS - 1))
            scf.YieldOp([arith.select(is_last, index(0), arith.addi(slot, index(1))), *bounds, *sums])
        self._store(list(steps.results)[3:])

    def _bounds(self, panel: ir.Value) -> list[ir.Value]:
        """Loads where the values of a panel begin and end, in pieces. The caller loads them long before the copy needs them."""
        at = arith.addi(self.first_panel, arith.minui(panel, index(self.panels - 1)))
        return [load_index(self.positions, arith.addi(at, index(i))) for i in range(2)]

    def _copy(self, panel: ir.Value, slot: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Starts to copy a panel, if it exists, into a slot of this warp. Ends the group of copies even if it does not."""
        with when(below(panel, index(self.panels))):
            self._copy_x(panel, slot)
            count = _masks(self.stored)
            masks = arith.muli(arith.addi(self.first_panel, panel), index(count))
            for source, to in zip(self.sources, (self.masks, self.offsets), strict=False):
                width = _PIECE // byte_width(ir.MemRefType(source.type).element_type)
                self._copy_pieces(source, to, slot, masks, index(count // width), count // width)
            first = arith.muli(begin, index(self.chunk))
            most = ROWS * self.stored.COLUMNS // self.chunk
            self._copy_pieces(self.sources[2], self.values, slot, first, arith.subi(end, begin), most)
        commit()

    def _copy_pieces(
        self, source: ir.Value, to: ir.Value, slot: ir.Value, first: ir.Value, pieces: ir.Value, most: int
    ) -> None:
        """Starts to copy `pieces` pieces of 16 bytes, at most `most`. Each lane copies one at a time."""
        width = _PIECE // byte_width(ir.MemRefType(source.type).element_type)
        for number in range(-(-most // WARP)):
            piece = arith.addi(self.operands.lane, index(number * WARP))
            with when(below(piece, pieces)):
                place = arith.muli(piece, index(width))
                copy_async(source, [arith.addi(first, place)], to, [self.warp, slot, place])

    def _copy_x(self, panel: ir.Value, slot: ir.Value) -> None:
        """Copies the panel's columns of all tokens, in the widest pieces that are aligned.

        cp.async cannot copy pieces below 4 bytes. They go through registers, and the lanes wait for them.
        """
        operands, size = self.operands, byte_width(self.spmm.element)
        width = widest(self.spmm.K, self.spmm.element, self.chunk)
        rounds = self.count * _LINE // (width * size * WARP)
        with rolled(index(0), index(rounds)) if rounds > _AT_ONCE else loop(index(0), index(rounds), index(1)) as steps:
            piece = arith.addi(arith.muli(steps.induction_variable, index(WARP)), operands.lane)
            row, number = divmod_by(piece, _LINE // (width * size))
            chunk, within = divmod_by(arith.muli(number, index(width)), self.chunk)
            column = arith.addi(arith.muli(panel, index(self.stored.COLUMNS)), arith.muli(number, index(width)))
            token = arith.addi(operands.first, row)
            exists = arith.andi(below(column, index(self.spmm.K)), below(token, operands.tokens))
            at = [arith.minui(token, operands.last), arith.minui(column, index(self.spmm.K - width))]
            place = [self.warp, slot, arith.addi(self._x_place(row, chunk), within)]
            if width * size >= 4:
                copy_async(operands.x, at, self.x, place, exists, width * size)
            else:
                read = load(vector_of(width, self.spmm.element), operands.x, at)
                store(arith.select(exists, read, zeros(read.type)), self.x, place)

    def _multiply(self, slot: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus w x^T of a panel."""
        result = list(sums)
        matrix, line = divmod_by(self.operands.lane, 8)
        b = [
            load_matrices(self.x, [self.warp, slot, self._x_place(arith.addi(line, index(8 * j)), matrix)])
            for j in range(self.widths)
        ]
        for i in range(_HEIGHTS):
            for depth in range(_DEPTHS):
                a = self.expanded(slot, i * _DEPTHS + depth)
                for j in range(self.widths):
                    number = i * self.widths + j
                    result[number] = multiply_add(a, b[j][2 * depth : 2 * depth + 2], result[number])
        return result

    def _store(self, sums: list[ir.Value]) -> None:
        """Adds up the sums of all warps and stores them through the epilogue into y."""
        operands, spmm = self.operands, self.spmm
        parts = shared(0, [_WARPS, self.count * _APART], spmm.sum_type)
        group, quarter = divmod_by(operands.lane, 4)
        gpu.barrier()  # the sums overwrite the slots, which no warp must still read
        for i in range(_HEIGHTS):
            for j in range(self.widths):
                for number in range(4):
                    token = arith.addi(arith.muli(quarter, index(2)), index(8 * j + number % 2))
                    row = arith.addi(group, index(16 * i + 8 * (number // 2)))
                    value = vector.extract(sums[i * self.widths + j], [], [number])
                    memref.store(value, parts, [self.warp, arith.addi(arith.muli(token, index(_APART)), row)])
        gpu.barrier()
        width = widest(spmm.M, ir.MemRefType(operands.out.type).element_type, 2)
        total = vector_of(width, spmm.sum_type)
        with loop(operands.thread, index(self.count * ROWS // width), index(_WARPS * WARP)) as pieces:
            t, row = divmod_by(arith.muli(pieces.induction_variable, index(width)), ROWS)
            token, feature = arith.addi(operands.first, t), arith.addi(arith.muli(operands.chunk, index(ROWS)), row)
            with when(arith.andi(below(token, operands.tokens), below(feature, index(spmm.M)))):
                place = arith.addi(arith.muli(t, index(_APART)), row)
                result = zeros(total)
                for warp in range(_WARPS):
                    result = added(result, load(total, parts, [index(warp), place]))
                operands.store(spmm.epilogue, result, token, feature)

    def _x_place(self, row: ir.Value, chunk: ir.Value) -> ir.Value:
        """Returns the place of 16 bytes of a row of x. Four neighbouring pairs of rows have the same chunk in four places."""
        spread = arith.andi(arith.divui(row, index(2)), index(3))
        chunks = arith.addi(arith.muli(row, index(_LINE // _PIECE)), arith.xori(chunk, spread))
        return arith.muli(chunks, index(self.chunk))

    def _before(self, mask: ir.Value) -> ir.Value:
        """Returns how many bits of a mask are set below this lane's own."""
        return ir.Operation.create("llvm.intr.ctpop", results=[self.i32], operands=[arith.andi(mask, self.lower)]).results[0]

    def i32_constant(self, value: int) -> ir.Value:
        """Returns a constant of 32 bits."""
        return arith.constant(self.i32, value)


def launch(spmm: GpuProduct, stored: type[Fragments], tokens: int) -> Launch:
    """Returns the launch of the kernel for so many tokens."""
    slot = tokens * _LINE + _value_bytes(spmm, stored) + (4 + 2) * _masks(stored)
    return Launch(tokens, -(-spmm.M // ROWS), _WARPS * WARP, _WARPS * _SLOTS * slot)


def _slots(before: int, size: int, element: ir.Type) -> ir.Value:
    """Returns shared memory of `size` bytes for each slot of each warp, after arrays with `before` bytes a slot."""
    return shared(_WARPS * _SLOTS * before, [_WARPS, _SLOTS, size // byte_width(element)], element)


def _value_bytes(spmm: GpuProduct, stored: type[Fragments]) -> int:
    """Returns the most bytes that the values of a panel take, and one piece more, which may be read after them."""
    return ROWS * stored.COLUMNS * byte_width(spmm.element) + _PIECE


def _masks(stored: type[Fragments]) -> int:
    """Returns the number of masks of a panel."""
    return 4 * _HEIGHTS * _DEPTHS * 8 // stored.LINES
