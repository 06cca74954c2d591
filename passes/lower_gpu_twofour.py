"""lower-gpu-twofour: a `kernel.spmm` of the schedule "gpu-twofour" becomes GPU kernels on sparse tensor cores.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-twofour", tile = [128, 128, 64], ...}
             : (..., tensor<3072x768xbf16, "twofour(reduction=1)">) -> ...
after    gpu.func @region_t128(...)                    // and _t32 for few tokens
           // a thread block computes 128 features x 128 tokens
           start to copy the first two panels
           scf.for %panel ... iter_args(4 x 4 x 4 sums)     // 64 columns of K: half of w's values, their metadata, all of x
             wait for the panel's copy, gpu.barrier
             start to copy the panel after the next
             each warp: nvgpu.ldmatrix and nvvm.mma.sp.sync on 64 features x 32 tokens
           through the epilogue into y

The weight is the sparse factor, so a product is y^T = w x^T: a lane ends up with eight neighbouring features of a token,
because the packing deals the rows to the products so. All is swizzled in shared memory such that no copy and no load has bank
conflicts. Columns of x beyond K are zeros; tokens past the last one repeat it, and are not stored. Only for bf16 and f16, K a
multiple of 8.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing, TwoFour
from gossamer.passes.family import Family, Matrix
from gossamer.passes.gpu_product import WARP, GpuProduct, Operands, divmod_by, shared, widest
from gossamer.passes.product import products
from gossamer.passes.tensor_core import CHUNK, commit, copy_async, load_matrices, multiply_add_sparse, wait
from gossamer.passes.vectors import index, loop, vector_of, zeros

_TOKENS = (128, 32)
_ROWS, _PANEL = TwoFour.ROWS, TwoFour.COLUMNS  # of a thread block, of a panel
_WARP_ROWS, _WARP_TOKENS = 64, 32
_HEIGHTS, _WIDTHS = _WARP_ROWS // 16, _WARP_TOKENS // 8  # products of a warp
_SLOTS = 3  # panels in shared memory: one that is multiplied, two on their way
_WORDS = _ROWS // _WARP_ROWS * (_PANEL // 32) * (_HEIGHTS // 2) * WARP  # of metadata in a panel
_W_BYTES = _ROWS * _PANEL // 2 * 2
_TILE = [_TOKENS[0], _ROWS, _PANEL]


def _storage(matrix: Matrix) -> TwoFour | None:
    fits = matrix.nm is not None and matrix.nm[0] <= 2 and matrix.nm[1] == 4
    return TwoFour(matrix.reduction) if fits and matrix.element in ("bf16", "f16") and matrix.columns % CHUNK == 0 else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens, rows of the weight, columns of K]"""
    return tuple(_TILE) if isinstance(stored, TwoFour) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Cycles of a multiprocessor's tensor cores, at half of their 2048 products a cycle."""
    return -(-tokens // _TOKENS[0]) * _TOKENS[0] * matrix.rows * matrix.columns / 1024


GPU_TWOFOUR = Family("gpu-twofour", "lower-gpu-twofour", _storage, _tile, _cycles)


@dataclass(frozen=True)
class LowerGpuTwofour:
    """Lower products of 2:4 weights to gpu, nvgpu and nvvm."""

    name: ClassVar[str] = "lower-gpu-twofour"

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_TWOFOUR.name):
            with op.location:
                if integers(op.tile) != _TILE:
                    raise CompileError(f"tile {integers(op.tile)} is not {_TILE}")
                spmm = GpuProduct(op)
                for tokens in _TOKENS:
                    spmm.kernel(f"t{tokens}", _launch(spmm, tokens), partial(_emit, spmm))
                spmm.erase()


def _launch(spmm: GpuProduct, tokens: int) -> Launch:
    threads = WARP * (_ROWS // _WARP_ROWS) * (tokens // _WARP_TOKENS)
    return Launch(tokens, -(-spmm.M // _ROWS), threads, _SLOTS * (tokens * _PANEL * 2 + _W_BYTES + _WORDS * 4))


def _emit(spmm: GpuProduct, operands: Operands) -> None:
    _Kernel(spmm, operands).emit()


class _Kernel:
    """Emits the body of one kernel. The 128 rows of the thread block are those of the operands' chunk."""

    def __init__(self, spmm: GpuProduct, operands: Operands) -> None:
        self.spmm, self.operands = spmm, operands
        self.words, self.values = operands.weight
        tokens = operands.launch.tokens
        x_bytes = _SLOTS * tokens * _PANEL * 2
        i32 = ir.IntegerType.get_signless(32)
        self.x = shared(0, [_SLOTS, tokens, _PANEL], spmm.element)
        self.w = shared(x_bytes, [_SLOTS, _ROWS // 2, _PANEL], spmm.element)  # two rows side by side
        self.metadata = shared(x_bytes + _SLOTS * _W_BYTES, [_SLOTS, _WORDS], i32)
        self.panels = -(-spmm.K // _PANEL)
        self.sums = vector_of(4, spmm.sum_type)
        self.token_warp, self.row_warp = divmod_by(operands.warp, _ROWS // _WARP_ROWS)

    def emit(self) -> None:
        for slot in range(_SLOTS - 1):
            self._copy(index(slot), index(slot))
        start = [index(0), *[zeros(self.sums)] * (_HEIGHTS * _WIDTHS)]
        with loop(index(0), index(self.panels), index(1), start) as steps:
            slot, *sums = steps.inner_iter_args
            wait(_SLOTS - 2)
            gpu.barrier()
            is_first = arith.cmpi(arith.CmpIPredicate.eq, slot, index(0))
            free = arith.select(is_first, index(_SLOTS - 1), arith.subi(slot, index(1)))
            self._copy(arith.addi(steps.induction_variable, index(_SLOTS - 1)), free)
            sums = self._multiply(slot, sums)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, slot, index(_SLOTS - 1))
            scf.YieldOp([arith.select(is_last, index(0), arith.addi(slot, index(1))), *sums])
        self._store(list(steps.results)[1:])

    def _copy(self, panel: ir.Value, slot: ir.Value) -> None:
        """Start to copy a panel, if there is such a one, into a slot of shared memory; a group even if there is not."""
        copied = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, panel, index(self.panels)))
        with ir.InsertionPoint(copied.then_block):
            self._copy_x(panel, slot)
            self._copy_w(panel, slot)
            self._copy_metadata(panel, slot)
            scf.YieldOp([])
        commit()

    def _copy_x(self, panel: ir.Value, slot: ir.Value) -> None:
        operands = self.operands
        line, chunk = divmod_by(operands.thread, _PANEL // CHUNK)
        k = arith.addi(arith.muli(panel, index(_PANEL)), arith.muli(chunk, index(CHUNK)))
        inside = arith.cmpi(arith.CmpIPredicate.ult, k, index(self.spmm.K))
        k = arith.minui(k, index(self.spmm.K - CHUNK))
        for first in range(0, operands.launch.tokens, operands.launch.threads * CHUNK // _PANEL):
            row = arith.addi(line, index(first))
            token = arith.minui(arith.addi(operands.first, row), operands.last)
            copy_async(operands.x, [token, k], self.x, [slot, row, _x_place(row, chunk)], inside)

    def _copy_w(self, panel: ir.Value, slot: ir.Value) -> None:
        chunks = _PANEL // 2 // CHUNK  # of a row
        line, chunk = divmod_by(self.operands.thread, chunks)
        origin = arith.muli(self.operands.chunk, index(_ROWS))
        column = arith.addi(arith.muli(panel, index(_PANEL // 2)), arith.muli(chunk, index(CHUNK)))
        for first in range(0, _ROWS, self.operands.launch.threads // chunks):
            row = arith.addi(line, index(first))
            at = arith.addi(arith.muli(arith.addi(origin, row), index(self.panels * _PANEL // 2)), column)
            copy_async(self.values, [at], self.w, [slot, *_w_place(row, chunk)])

    def _copy_metadata(self, panel: ir.Value, slot: ir.Value) -> None:
        threads, words = _WORDS // 4, _WORDS // (_ROWS // _WARP_ROWS)
        mine = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, self.operands.thread, index(threads)))
        with ir.InsertionPoint(mine.then_block):
            strip, place = divmod_by(arith.muli(self.operands.thread, index(4)), words)
            strip_of_all = arith.addi(arith.muli(self.operands.chunk, index(_ROWS // _WARP_ROWS)), strip)
            first = arith.addi(arith.muli(strip_of_all, index(self.panels)), panel)
            at = arith.addi(arith.muli(first, index(words)), place)
            copy_async(self.words, [at], self.metadata, [slot, arith.muli(self.operands.thread, index(4))])
            scf.YieldOp([])

    def _multiply(self, slot: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """sums + w x^T of a panel, for the warp's rows and tokens."""
        lane, result = self.operands.lane, list(sums)
        matrix, line = divmod_by(lane, 8)
        right, lower = divmod_by(matrix, 2)
        w_row = arith.addi(arith.muli(self.row_warp, index(_WARP_ROWS)), arith.addi(arith.muli(line, index(8)), lower))
        x_row = arith.addi(arith.muli(self.token_warp, index(_WARP_TOKENS)), line)
        for step in range(_PANEL // 32):
            b = []
            for j in range(_WIDTHS):
                row, chunk = arith.addi(x_row, index(8 * j)), arith.addi(matrix, index(4 * step))
                b.append(load_matrices(self.x, [slot, row, _x_place(row, chunk)]))
            for i in range(_HEIGHTS):
                row, chunk = arith.addi(w_row, index(2 * i)), arith.addi(right, index(2 * step))
                a = load_matrices(self.w, [slot, *_w_place(row, chunk)])
                if i % 2 == 0:
                    strip = arith.muli(self.row_warp, index(_WORDS // (_ROWS // _WARP_ROWS)))
                    word = arith.addi(arith.addi(strip, index((2 * step + i // 2) * WARP)), lane)
                    metadata = memref.load(self.metadata, [slot, word])
                for j in range(_WIDTHS):
                    number = i * _WIDTHS + j
                    result[number] = multiply_add_sparse(a, metadata, i % 2, b[j], result[number])
        return result

    def _store(self, sums: list[ir.Value]) -> None:
        """Through the epilogue into y, as many features at a time as are aligned."""
        operands, spmm = self.operands, self.spmm
        group, quarter = divmod_by(operands.lane, 4)
        warp_row = arith.addi(arith.muli(operands.chunk, index(_ROWS)), arith.muli(self.row_warp, index(_WARP_ROWS)))
        first = arith.addi(warp_row, arith.muli(group, index(2 * _HEIGHTS)))
        pair = arith.addi(arith.muli(self.token_warp, index(_WARP_TOKENS)), arith.muli(quarter, index(2)))
        width = widest(spmm.M, ir.MemRefType(operands.out.type).element_type, 2 * _HEIGHTS)
        for j in range(_WIDTHS):
            for odd in range(2):
                token = arith.addi(operands.first, arith.addi(pair, index(8 * j + odd)))
                exists = arith.cmpi(arith.CmpIPredicate.ult, token, operands.tokens)
                mine = [
                    vector.extract(sums[i * _WIDTHS + j], [], [2 * half + odd]) for i in range(_HEIGHTS) for half in range(2)
                ]
                for piece in range(0, 2 * _HEIGHTS, width):
                    feature = arith.addi(first, index(piece))
                    inside = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ult, feature, index(spmm.M)))
                    stored = scf.IfOp(inside)
                    with ir.InsertionPoint(stored.then_block):
                        values = vector.from_elements(vector_of(width, spmm.sum_type), mine[piece : piece + width])
                        operands.store(spmm.epilogue, values, token, feature)
                        scf.YieldOp([])


def _x_place(row: ir.Value, chunk: ir.Value) -> ir.Value:
    """Where 8 elements of a row of x lie: eight neighbouring rows have a chunk in eight places."""
    return arith.muli(arith.xori(chunk, arith.andi(row, index(7))), index(CHUNK))


def _w_place(row: ir.Value, chunk: ir.Value) -> list[ir.Value]:
    """Line and place of 8 values of a row of w: rows 8 apart, which a product takes, have a chunk in eight places."""
    line, odd = divmod_by(row, 2)
    side = arith.addi(arith.muli(odd, index(4)), chunk)
    spread = arith.andi(arith.divui(row, index(8)), index(7))
    return [line, arith.muli(arith.xori(side, spread), index(CHUNK))]
