"""lower-gpu-expand: a `kernel.spmm` of the schedule "gpu-expand" loads a sparse weight and multiplies a dense one (few tokens).

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-expand", tile = [16, 32, 32], ...}
             : (..., tensor<3072x768xbf16, "fragments(reduction=1)">) -> ...
after    gpu.func @region_t16(...)                     // and _t8
           // a thread block computes 32 features, each of its 8 warps every eighth panel of 32 columns of K
           each warp: start to copy its first two panels: masks, offsets, values of w; x[16 tokens][32]
           scf.for %panel step 8 iter_args(2 x 2 x 4 sums)
             start to copy the panel after the next; wait for the panel's own copy
             each lane: its elements of w, values[offset + ctpop(mask below)] where the mask has a bit, else 0
             nvgpu.ldmatrix of x; nvvm.mma.sync
           the warps' sums added up through shared memory; through the epilogue into y

With few tokens the weight has to come from memory and little else takes time: at 60 % zeros, a bit and a half an element and
the nonzeros are half of the dense weight. Lanes take a tile's elements from the packed values right into the registers that
tensor cores read (as SpInfer does: Fan et al., EuroSys 2025; the idea is Flash-LLM's: Xia et al., VLDB 2023). Warps share
nothing before the end, so nothing but their own copies is waited for. Zeros are multiplied: an infinity in x gives NaN as in
the dense product. Tokens past the last and columns beyond K are zeros, and not read. Only for bf16 and f16, K a multiple of 8.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, memref, scf, vector

from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import Fragments
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.gpu_threads import WARP, below, divmod_by, load, shared, sync_warp, when, widest
from gossamer.passes.loops.product import products
from gossamer.passes.loops.tensor_core import CHUNK, commit, copy_async, load_matrices, multiply_add, wait
from gossamer.passes.loops.vectors import index, load_index, loop, vector_of, zeros
from gossamer.passes.weights_gpu.gpu_product import GpuProduct, Operands

_TOKENS = (16, 8)
_WARPS = 8
_ROWS, _PANEL, _PIECE = Fragments.ROWS, Fragments.COLUMNS, Fragments.PIECE
_HEIGHTS, _DEPTHS = _ROWS // 16, _PANEL // 16  # tiles of a panel
_MASKS = _ROWS * _PANEL // 32  # of a panel
_VALUES = _ROWS * _PANEL + _PIECE  # of a panel at most, and what is read behind them
_SLOTS = 3  # panels of a warp in shared memory: one that is multiplied, two on their way
_APART = _ROWS + 4  # f32 between the sums of neighbouring tokens: then no two lanes store to one bank
_TILE = [_TOKENS[0], _ROWS, _PANEL]
_FEW = 64  # tokens up to which it may be the fastest


def _storage(matrix: Matrix) -> Fragments | None:
    fits = matrix.element in ("bf16", "f16") and matrix.columns % CHUNK == 0
    return Fragments(matrix.reduction) if fits else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens, rows of the weight, columns of K]"""
    return tuple(_TILE) if isinstance(stored, Fragments) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Cycles of a multiprocessor: 15 bytes of memory a cycle, which masks, offsets and values have to pass, and some 50
    instructions to expand a tile of 16 x 16, of which it does 2.5 a cycle."""
    tiles = -(-tokens // _TOKENS[0]) * matrix.rows * matrix.columns / 256
    return tiles * max(256 * (1.5 / 8 + 2 * matrix.density) / 15, 50 / 2.5)


GPU_EXPAND = Family("gpu-expand", _storage, _tile, _cycles, most=_FEW)


@dataclass(frozen=True)
class LowerGpuExpand:
    """Lower products with few tokens to gpu, nvgpu and nvvm."""

    name: ClassVar[str] = "lower-gpu-expand"

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_EXPAND.name):
            with op.location:
                spmm = GpuProduct(op, _TILE)
                spmm.kernels({tokens: _launch(spmm, tokens) for tokens in _TOKENS}, partial(_emit, spmm))


def _launch(spmm: GpuProduct, tokens: int) -> Launch:
    stage = 2 * _VALUES + 4 * _MASKS + 2 * _MASKS + 2 * tokens * _PANEL
    return Launch(tokens, -(-spmm.M // _ROWS), _WARPS * WARP, _WARPS * _SLOTS * stage)


def _emit(spmm: GpuProduct, operands: Operands) -> None:
    _Kernel(spmm, operands).emit()


class _Kernel:
    """Emits the body of one kernel. The 32 rows of the thread block are those of the operands' chunk."""

    def __init__(self, spmm: GpuProduct, operands: Operands) -> None:
        self.spmm, self.operands = spmm, operands
        self.positions, *self.sources = operands.weight
        self.count, self.warp = operands.launch.tokens, operands.warp
        self.i32, i16 = (ir.IntegerType.get_signless(width) for width in (32, 16))
        sizes = [(self.count * _PANEL, spmm.element), (_MASKS, self.i32), (_MASKS, i16), (_VALUES, spmm.element)]
        buffers, at = [], 0
        for size, element in sizes:
            buffers.append(shared(at, [_WARPS, _SLOTS, size], element))
            at += _WARPS * _SLOTS * size * (4 if element == self.i32 else 2)
        self.x, *self.stored = buffers
        self.masks, self.offsets, self.values = self.stored
        self.panels = -(-spmm.K // _PANEL)
        self.first_panel = arith.muli(operands.chunk, index(self.panels))
        self.widths = self.count // 8
        self.sums = vector_of(4, spmm.sum_type)
        self._prepare_lane()

    def _prepare_lane(self) -> None:
        """Which bits of a mask are this lane's: two neighbours, `shift` and the next one; `lower` has those before."""
        half, place = divmod_by(self.operands.lane, WARP // 2)
        self.mask_of_half = arith.muli(half, index(4))
        self.shift = arith.index_cast(self.i32, arith.muli(place, index(2)))
        one = self._i32(1)
        self.lower = arith.subi(arith.shli(one, self.shift), one)

    def emit(self) -> None:
        panels = [arith.addi(self.warp, index(slot * _WARPS)) for slot in range(_SLOTS)]
        for slot, panel in enumerate(panels[:-1]):
            self._copy(panel, index(slot), *self._bounds(panel))
        start = [index(0), *self._bounds(panels[-1]), *[zeros(self.sums)] * (_HEIGHTS * self.widths)]
        with loop(self.warp, index(self.panels), index(_WARPS), start) as steps:
            slot, begin, end, *sums = steps.inner_iter_args
            sync_warp()  # all lanes have read the slot that is free now
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
        """Where the values of a panel begin and end, in pieces. They are asked for long before the copy needs them."""
        at = arith.addi(self.first_panel, arith.minui(panel, index(self.panels - 1)))
        return [load_index(self.positions, arith.addi(at, index(i))) for i in range(2)]

    def _copy(self, panel: ir.Value, slot: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """Start to copy a panel, if there is such a one, into a slot of this warp; a group even if there is not."""
        with when(below(panel, index(self.panels))):
            self._copy_x(panel, slot)
            masks = arith.muli(arith.addi(self.first_panel, panel), index(_MASKS))
            for source, to, count in zip(self.sources[:2], self.stored[:2], (4, 8), strict=True):
                self._copy_pieces(source, to, slot, masks, index(_MASKS // count), count)
            first = arith.muli(begin, index(_PIECE))
            self._copy_pieces(self.sources[2], self.values, slot, first, arith.subi(end, begin), _PIECE)
        commit()

    def _copy_pieces(
        self, source: ir.Value, to: ir.Value, slot: ir.Value, first: ir.Value, pieces: ir.Value, count: int
    ) -> None:
        """Pieces of `count` elements, which are 16 bytes, one a lane at a time."""
        with loop(self.operands.lane, pieces, index(WARP)) as steps:
            place = arith.muli(steps.induction_variable, index(count))
            copy_async(source, [arith.addi(first, place)], to, [self.warp, slot, place])

    def _copy_x(self, panel: ir.Value, slot: ir.Value) -> None:
        operands = self.operands
        line, chunk = divmod_by(operands.lane, _PANEL // CHUNK)
        k = arith.addi(arith.muli(panel, index(_PANEL)), arith.muli(chunk, index(CHUNK)))
        inside, k = below(k, index(self.spmm.K)), arith.minui(k, index(self.spmm.K - CHUNK))
        for first in range(0, self.count, WARP * CHUNK // _PANEL):
            row = arith.addi(line, index(first))
            token = arith.addi(operands.first, row)
            exists = arith.andi(inside, below(token, operands.tokens))
            place = [self.warp, slot, _x_place(row, chunk)]
            copy_async(operands.x, [arith.minui(token, operands.last), k], self.x, place, exists)

    def _multiply(self, slot: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + w x^T of a panel."""
        result = list(sums)
        matrix, line = divmod_by(self.operands.lane, 8)
        b = [
            load_matrices(self.x, [self.warp, slot, _x_place(arith.addi(line, index(8 * j)), matrix)])
            for j in range(self.widths)
        ]
        for i in range(_HEIGHTS):
            for depth in range(_DEPTHS):
                a = self._expanded(slot, i * _DEPTHS + depth)
                for j in range(self.widths):
                    number = i * self.widths + j
                    result[number] = multiply_add(a, b[j][2 * depth : 2 * depth + 2], result[number])
        return result

    def _expanded(self, slot: ir.Value, tile: int) -> list[ir.Value]:
        """This lane's elements of a tile of w, zeros included: two of each quarter."""
        at = [self.warp, slot, arith.addi(index(8 * tile), self.mask_of_half)]
        masks = load(vector_of(4, self.i32), self.masks, at)
        offsets = load(vector_of(4, ir.IntegerType.get_signless(16)), self.offsets, at)
        found = []
        for quarter in range(4):
            mask = vector.extract(masks, [], [quarter])
            before = arith.andi(mask, self.lower)
            before = ir.Operation.create("llvm.intr.ctpop", results=[self.i32], operands=[before]).results[0]
            place = arith.addi(arith.extui(self.i32, vector.extract(offsets, [], [quarter])), before)
            mine = arith.shrui(mask, self.shift)
            pair = []
            for number in range(2):
                bit = arith.andi(arith.shrui(mine, self._i32(number)), self._i32(1))
                at_value = arith.index_castui(ir.IndexType.get(), place)
                value = memref.load(self.values, [self.warp, slot, at_value])
                is_there = arith.cmpi(arith.CmpIPredicate.ne, bit, self._i32(0))
                pair.append(arith.select(is_there, value, arith.constant(self.spmm.element, 0.0)))
                place = arith.addi(place, bit)
            found.append(vector.from_elements(vector_of(2, self.spmm.element), pair))
        return found

    def _store(self, sums: list[ir.Value]) -> None:
        """The sums of all warps, added up and through the epilogue into y."""
        operands, spmm = self.operands, self.spmm
        parts = shared(0, [_WARPS, self.count * _APART], spmm.sum_type)
        group, quarter = divmod_by(operands.lane, 4)
        gpu.barrier()  # what was copied is used up
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
        with loop(operands.thread, index(self.count * _ROWS // width), index(_WARPS * WARP)) as pieces:
            t, row = divmod_by(arith.muli(pieces.induction_variable, index(width)), _ROWS)
            token, feature = arith.addi(operands.first, t), arith.addi(arith.muli(operands.chunk, index(_ROWS)), row)
            with when(arith.andi(below(token, operands.tokens), below(feature, index(spmm.M)))):
                place = arith.addi(arith.muli(t, index(_APART)), row)
                added = zeros(total)
                for warp in range(_WARPS):
                    added = arith.addf(added, load(total, parts, [index(warp), place]))
                operands.store(spmm.epilogue, added, token, feature)

    def _i32(self, value: int) -> ir.Value:
        return arith.constant(self.i32, value)


def _x_place(row: ir.Value, chunk: ir.Value) -> ir.Value:
    """Where 8 elements of a row of x lie: pairs of neighbouring rows have a chunk in four places."""
    spread = arith.andi(arith.divui(row, index(2)), index(3))
    return arith.addi(arith.muli(row, index(_PANEL)), arith.muli(arith.xori(chunk, spread), index(CHUNK)))
