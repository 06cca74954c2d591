"""lower-gpu-twofour: lowers a `kernel.spmm` of the schedule "gpu-twofour" to GPU kernels on sparse tensor cores.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-twofour", tile = [128, 128, 64], ...}
             : (..., tensor<3072x768xbf16, "twofour(reduction=1)">) -> ...
after    gpu.func @region_t128(...)                    // and _t32 for few tokens
           // a thread block computes 128 features x 128 tokens
           start to copy the first two panels
           scf.for %panel ... iter_args(4 x 4 x 4 sums)     // 64 columns of K: half of w's values, their metadata, all of x
             wait for the panel's copy, gpu.barrier
             start to copy the panel after the next
             each warp: nvgpu.ldmatrix and nvvm.mma.sp.sync on 64 features x 32 tokens
           the sums through the epilogue into y

The matrices are swizzled in shared memory such that no copy and no load has bank conflicts. Columns of x beyond K are zeros.
Tokens past the last one repeat it, and are not stored. The element must be bf16 or f16, and K a multiple of 8.
"""

from dataclasses import dataclass
from functools import partial

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, scf

from gossamer.dialects.format import Format
from gossamer.dialects.gpu_packings import TwoFour
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix, entries_read
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.gpu.two_four_loop import PANEL, ROWS, SLOT_BYTES, STEPS, WARP_TOKENS, TwoFourRows, threads
from gossamer.passes.loops.gpu_threads import below, divmod_by, shared, when
from gossamer.passes.loops.product import products
from gossamer.passes.loops.tensor_core import CHUNK, commit, copy_async, load_matrices, wait
from gossamer.passes.loops.vectors import index, loop

_TOKENS = (128, 32)
_SLOTS = 3  # panels in shared memory: one that is multiplied, two that are being copied
_TILE = [_TOKENS[0], ROWS, PANEL]


def _storage(matrix: Matrix) -> TwoFour | None:
    fits = matrix.nm is not None and matrix.nm[0] <= 2 and matrix.nm[1] == 4
    return TwoFour(matrix.reduction) if fits and matrix.element in ("bf16", "f16") and matrix.columns % CHUNK == 0 else None


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight, columns of K]."""
    return tuple(_TILE) if isinstance(stored, TwoFour) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of a multiprocessor's tensor cores, at half of their 2048 products a cycle."""
    return -(-tokens // _TOKENS[0]) * _TOKENS[0] * matrix.rows * matrix.columns / 1024


GPU_TWOFOUR = Family("gpu-twofour", _storage, _tile, _cycles, read=entries_read)


@dataclass(frozen=True)
class LowerGpuTwofour:
    """Lowers products of 2:4 weights to gpu, nvgpu and nvvm."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_TWOFOUR.name):
            with op.location:
                spmm = GpuProduct(op, _TILE)
                spmm.kernels({tokens: _launch(spmm, tokens) for tokens in _TOKENS}, partial(_emit, spmm))


def _launch(spmm: GpuProduct, tokens: int) -> Launch:
    return Launch(tokens, -(-spmm.M // ROWS), threads(tokens), _SLOTS * (tokens * PANEL * 2 + SLOT_BYTES))


def _emit(spmm: GpuProduct, operands: Operands) -> None:
    _Kernel(spmm, operands).emit()


class _Kernel:
    """Emits the body of one kernel. A thread block computes the 128 rows of the operands' chunk."""

    def __init__(self, spmm: GpuProduct, operands: Operands) -> None:
        self.spmm, self.operands = spmm, operands
        tokens = operands.launch.tokens
        self.x = shared(0, [_SLOTS, tokens, PANEL], spmm.element)
        self.panels = -(-spmm.K // PANEL)
        self.rows = TwoFourRows(spmm, operands, self.panels, _SLOTS, _SLOTS * tokens * PANEL * 2)

    def emit(self) -> None:
        for slot in range(_SLOTS - 1):
            self._copy(index(slot), index(slot))
        with loop(index(0), index(self.panels), index(1), [index(0), *self.rows.start()]) as steps:
            slot, *sums = steps.inner_iter_args
            wait(_SLOTS - 2)
            gpu.barrier()
            is_first = arith.cmpi(arith.CmpIPredicate.eq, slot, index(0))
            free = arith.select(is_first, index(_SLOTS - 1), arith.subi(slot, index(1)))
            self._copy(arith.addi(steps.induction_variable, index(_SLOTS - 1)), free)
            sums = self.rows.multiply(slot, range(STEPS), lambda step, j: self._fragments(slot, step, j), sums)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, slot, index(_SLOTS - 1))
            scf.YieldOp([arith.select(is_last, index(0), arith.addi(slot, index(1))), *sums])
        self.rows.store(list(steps.results)[1:])

    def _copy(self, panel: ir.Value, slot: ir.Value) -> None:
        """Starts to copy a panel, if it exists, into a slot of shared memory. Ends the group of copies even if it does not."""
        with when(below(panel, index(self.panels))):
            self._copy_x(panel, slot)
            self.rows.copy(panel, slot)
        commit()

    def _copy_x(self, panel: ir.Value, slot: ir.Value) -> None:
        operands = self.operands
        line, chunk = divmod_by(operands.thread, PANEL // CHUNK)
        k = arith.addi(arith.muli(panel, index(PANEL)), arith.muli(chunk, index(CHUNK)))
        inside = below(k, index(self.spmm.K))
        k = arith.minui(k, index(self.spmm.K - CHUNK))
        for first in range(0, operands.launch.tokens, operands.launch.threads * CHUNK // PANEL):
            row = arith.addi(line, index(first))
            token = arith.minui(arith.addi(operands.first, row), operands.last)
            copy_async(operands.x, [token, k], self.x, [slot, row, _x_place(row, chunk)], inside)

    def _fragments(self, slot: ir.Value, step: int, j: int) -> list[ir.Value]:
        """Loads the fragments of x for a step and the j-th 8 tokens of the warp."""
        matrix, line = divmod_by(self.operands.lane, 8)
        x_row = arith.addi(arith.muli(self.rows.token_warp, index(WARP_TOKENS)), line)
        row, chunk = arith.addi(x_row, index(8 * j)), arith.addi(matrix, index(4 * step))
        return load_matrices(self.x, [slot, row, _x_place(row, chunk)])


def _x_place(row: ir.Value, chunk: ir.Value) -> ir.Value:
    """Returns the place of 8 elements of a row of x. Eight neighbouring rows have the same chunk in eight different places."""
    return arith.muli(arith.xori(chunk, arith.andi(row, index(7))), index(CHUNK))
