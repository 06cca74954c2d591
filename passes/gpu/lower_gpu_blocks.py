"""lower-gpu-blocks: lowers a `kernel.spmm` of the schedule "gpu-blocks" to GPU kernels that multiply blocks on tensor cores.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-blocks", tile = [128, 64, 64], ...}
             : (..., tensor<3072x768xbf16, #BSR>) -> ...
after    gpu.func @region_t128(...)                    // and _t32 for few tokens
           // a thread block computes 128 tokens x the 64 features of a row of blocks
           start to copy the first two panels
           scf.for %panel ... iter_args(16 x 8 sums)   // 64 columns of K: a block, a half of one, or several narrow ones
             wait for the panel's copy, gpu.barrier
             start to copy the panel after the next: x[128 tokens][columns of the block], w's block [64][64]
             each warp: nvgpu.ldmatrix and nvvm.mma.sync on its part of the tile
           the sums through the epilogue into y

The matrices are swizzled in shared memory so that no copy and no load has bank conflicts. The features of a warp are dealt to
the columns of its products such that a lane has neighbouring ones, which it stores as a vector. Columns beyond K and blocks
beyond the last are zeros. Tokens past the last one repeat it, and are not stored. K must be a multiple of 8 for bf16 and f16,
of 16 for int8. With int8, a panel has 128 columns of K, and sums are exact.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, scf, vector

from gossamer.dialects.elements import WEIGHTS
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.gpu_threads import WARP, divmod_by, shared, widest
from gossamer.passes.loops.product import products
from gossamer.passes.loops.tensor_core import commit, copy_async, load_matrices, multiply_add, wait
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, vector_of, zeros

_SIZES = (128, 64, 32, 16)  # rows and columns of a block
_TOKENS = (128, 32)
_LINE = 128  # bytes of a row of a panel, which is multiplied between two barriers: one row of all banks of shared memory
_PIECE = 16  # bytes that a thread copies at once; also the bytes of a row of a matrix that ldmatrix loads
_SLOTS = 3  # panels in shared memory: one that is multiplied, two that are being copied


def _storage(matrix: Matrix) -> Format | None:
    """Returns block CSR with 32-bit positions and coordinates, in the largest blocks that divide those of the weight.

    Returns None if there are no such blocks, for elements above 2 bytes, and for a K that is no multiple of 16 bytes.
    """
    width = WEIGHTS[matrix.element].bytes
    if matrix.block is None or width > 2 or matrix.columns * width % _PIECE:
        return None
    rows, columns = (next((size for size in _SIZES if extent % size == 0), 0) for extent in matrix.block)
    return _blocked(matrix, rows, columns) if rows and columns else None


def _blocked(matrix: Matrix, rows: int, columns: int) -> Format:
    stored = Format.bsr(rows, columns).with_widths(32, 32)
    return stored if matrix.reduction == 1 else stored.permuted((1, 0))


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of a block, columns of a block]."""
    if not isinstance(stored, Format):
        return None
    rows, columns = (level.block for level in stored.levels[:2])
    known = rows in _SIZES and columns in _SIZES and stored == _blocked(matrix, rows, columns)
    return (_TOKENS[0], rows, columns) if known else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of a multiprocessor's tensor cores, at half of their rate: 1024 products of 16 bits, 2048 of bytes."""
    return -(-tokens // _TOKENS[0]) * _TOKENS[0] * matrix.nonzeros * WEIGHTS[matrix.element].bytes / 1024


def _read(matrix: Matrix) -> float:
    """Returns the bytes of the values. A block has hundreds of them and one coordinate, which is not counted."""
    return matrix.nonzeros / matrix.fill * WEIGHTS[matrix.element].bytes


GPU_BLOCKS = Family("gpu-blocks", _storage, _tile, _cycles, integers=True, read=_read)


@dataclass(frozen=True)
class LowerGpuBlocks:
    """Lowers products of block CSR to gpu, nvgpu and nvvm."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_BLOCKS.name):
            with op.location:
                spmm = _Spmm(op)
                for tokens in _TOKENS:
                    tile = _Tile(spmm, tokens)
                    spmm.kernel(f"t{tokens}", tile.launch, partial(_emit, tile))
                spmm.erase()


class _Spmm(GpuProduct):
    """A kernel.spmm whose weight is stored in blocks of `rows` x `columns`."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        tile = integers(op.tile)
        if len(tile) != 3 or tile[0] != _TOKENS[0] or not {*tile[1:]} <= {*_SIZES}:
            sizes = ", ".join(map(str, _SIZES))
            raise CompileError(f"tile {tile} is not [{_TOKENS[0]}, rows, columns] with rows and columns one of {sizes}")
        _, self.rows, self.columns = tile
        self.chunk, self.panel = (size // byte_width(self.element) for size in (_PIECE, _LINE))  # both in elements


class _Tile:
    """The sizes of one of the kernels. A warp has `warp_tokens` x `warp_rows` sums, in products of 16 x 8."""

    def __init__(self, spmm: _Spmm, tokens: int) -> None:
        self.spmm, self.tokens = spmm, tokens
        self.warp_rows = min(spmm.rows, 32)
        self.warp_tokens = 16 if tokens == 32 else 32 if spmm.rows <= 32 else 64
        self.row_warps = spmm.rows // self.warp_rows
        self.threads = WARP * self.row_warps * (tokens // self.warp_tokens)
        self.x_bytes = _SLOTS * tokens * _LINE
        blocks = -(-spmm.M // spmm.rows)
        self.launch = Launch(tokens, blocks, self.threads, self.x_bytes + _SLOTS * spmm.rows * _LINE)


def _emit(tile: _Tile, operands: Operands) -> None:
    _Kernel(tile, operands).emit()


class _Kernel:
    """Emits the body of one kernel. A thread block computes one row of blocks, the operands' chunk."""

    def __init__(self, tile: _Tile, operands: Operands) -> None:
        self.tile, self.spmm, self.operands = tile, tile.spmm, operands
        positions, self.coordinates, self.values = operands.weight
        self.begin = load_index(positions, operands.chunk)
        self.end = load_index(positions, arith.addi(operands.chunk, index(1)))
        self.together = max(1, self.spmm.panel // self.spmm.columns)  # blocks side by side in a panel
        self.parts = max(1, self.spmm.columns // self.spmm.panel)  # panels that a block takes
        self.x = shared(0, [_SLOTS, tile.tokens, self.spmm.panel], self.spmm.element)
        self.w = shared(tile.x_bytes, [_SLOTS, self.spmm.rows, self.spmm.panel], self.spmm.element)
        self.sums = vector_of(4, self.spmm.sum_type)
        self.columns = tile.warp_rows // 8  # products side by side in a warp
        self.heights = tile.warp_tokens // 16
        token_warp, row_warp = divmod_by(operands.warp, tile.row_warps)
        self.warp_token = arith.muli(token_warp, index(tile.warp_tokens))
        self.warp_row = arith.muli(row_warp, index(tile.warp_rows))

    def emit(self) -> None:
        blocks = arith.subi(self.end, self.begin)
        panels = arith.muli(arith.ceildivui(blocks, index(self.together)), index(self.parts))
        for slot in range(_SLOTS - 1):
            self._copy(index(slot), index(slot), panels)
        start = [index(0), *[zeros(self.sums)] * (self.heights * self.columns)]
        with loop(index(0), panels, index(1), start) as steps:
            slot, *sums = steps.inner_iter_args
            wait(_SLOTS - 2)
            gpu.barrier()
            is_first = arith.cmpi(arith.CmpIPredicate.eq, slot, index(0))
            free = arith.select(is_first, index(_SLOTS - 1), arith.subi(slot, index(1)))
            self._copy(arith.addi(steps.induction_variable, index(_SLOTS - 1)), free, panels)
            sums = self._multiply(slot, sums)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, slot, index(_SLOTS - 1))
            scf.YieldOp([arith.select(is_last, index(0), arith.addi(slot, index(1))), *sums])
        self._store(list(steps.results)[1:])

    def _copy(self, panel: ir.Value, slot: ir.Value, panels: ir.Value) -> None:
        """Starts to copy a panel, if it exists, into a slot of shared memory. Ends the group of copies even if it does not."""
        copied = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, panel, panels))
        with ir.InsertionPoint(copied.then_block):
            self._copy_existing(panel, slot)
            scf.YieldOp([])
        commit()

    def _copy_existing(self, panel: ir.Value, slot: ir.Value) -> None:
        spmm, operands = self.spmm, self.operands
        line, chunk = divmod_by(operands.thread, _LINE // _PIECE)
        number, part = divmod_by(panel, self.parts)
        side, column = divmod_by(arith.muli(chunk, index(spmm.chunk)), min(spmm.columns, spmm.panel))
        column = arith.addi(column, arith.muli(part, index(spmm.panel)))
        block = arith.addi(arith.addi(self.begin, arith.muli(number, index(self.together))), side)
        in_row = arith.cmpi(arith.CmpIPredicate.ult, block, self.end)
        block = arith.minui(block, arith.subi(self.end, index(1)))
        k = arith.addi(arith.muli(load_index(self.coordinates, block), index(spmm.columns)), column)
        inside = arith.andi(in_row, arith.cmpi(arith.CmpIPredicate.ult, k, index(spmm.K)))
        k = arith.minui(k, index(spmm.K - spmm.chunk))
        lines = self.tile.threads * _PIECE // _LINE  # rows of a panel that all threads copy at once
        for first in range(0, self.tile.tokens, lines):
            row = arith.addi(line, index(first))
            token = arith.minui(arith.addi(operands.first, row), operands.last)
            copy_async(operands.x, [token, k], self.x, [slot, row, self._x_place(row, chunk)], inside)
        for first in range(0, spmm.rows, lines):
            row = arith.addi(line, index(first))
            at = arith.addi(arith.muli(block, index(spmm.rows)), row)
            at = arith.addi(arith.muli(at, index(spmm.columns)), column)
            copy_async(self.values, [at], self.w, [slot, row, self._w_place(row, chunk)], in_row)

    def _x_place(self, row: ir.Value, chunk: ir.Value) -> ir.Value:
        """Returns the place of 16 bytes of a row of x. Eight neighbouring rows have the same chunk in eight places."""
        return arith.muli(arith.xori(chunk, arith.andi(row, index(7))), index(self.spmm.chunk))

    def _w_place(self, row: ir.Value, chunk: ir.Value) -> ir.Value:
        """Returns the same for w. Here the eight rows that a product takes (see _multiply) have eight different places."""
        low = arith.andi(row, index(1))
        high = arith.andi(arith.divui(row, index(2 * self.columns)), index(3))
        place = arith.ori(low, arith.shli(high, index(1)))
        return arith.muli(arith.xori(chunk, place), index(self.spmm.chunk))

    def _multiply(self, slot: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus x w^T of a panel, for the warp's tokens and rows.

        Column c of product j is row 2 n (c / 2) + 2 j + c % 2 of the rows of n products. Lane q has the columns 2q and 2q + 1
        of all products, so its rows are the 2 n neighbouring ones from 2 n q on.
        """
        lane, result = self.operands.lane, list(sums)
        matrix, line = divmod_by(lane, 8)
        upper, right = divmod_by(matrix, 2)
        x_row = arith.addi(arith.addi(self.warp_token, line), arith.muli(right, index(8)))
        pair, odd = divmod_by(line, 2)
        w_row = arith.addi(self.warp_row, arith.addi(arith.muli(pair, index(2 * self.columns)), odd))
        w_row = arith.addi(w_row, arith.muli(upper, index(2)))
        for k in range(_LINE // (2 * _PIECE)):
            x_chunk, w_chunk = (arith.addi(index(2 * k), half) for half in (upper, right))
            a = []
            for i in range(self.heights):
                row = arith.addi(x_row, index(16 * i))
                a.append(load_matrices(self.x, [slot, row, self._x_place(row, x_chunk)]))
            b: list[list[ir.Value]] = []
            for j in range(0, self.columns, 2):
                row = arith.addi(w_row, index(2 * j))
                left0, left1, right0, right1 = load_matrices(self.w, [slot, row, self._w_place(row, w_chunk)])
                b += [[left0, left1], [right0, right1]]
            for i in range(self.heights):
                for j in range(self.columns):
                    number = i * self.columns + j
                    result[number] = multiply_add(a[i], b[j], result[number])
        return result

    def _store(self, sums: list[ir.Value]) -> None:
        """Stores the epilogue's results into y, in the widest vectors of features that are aligned."""
        operands, spmm = self.operands, self.spmm
        group, quarter = divmod_by(operands.lane, 4)
        first = arith.addi(arith.muli(operands.chunk, index(spmm.rows)), self.warp_row)
        first = arith.addi(first, arith.muli(quarter, index(2 * self.columns)))
        width = widest(spmm.M, ir.MemRefType(operands.out.type).element_type, 2 * self.columns)
        for i in range(self.heights):
            for half in range(2):
                row_of_tile = arith.addi(arith.addi(self.warp_token, group), index(16 * i + 8 * half))
                token = arith.addi(operands.first, row_of_tile)
                exists = arith.cmpi(arith.CmpIPredicate.ult, token, operands.tokens)
                mine = [
                    vector.extract(sums[i * self.columns + j], [], [2 * half + odd])
                    for j in range(self.columns)
                    for odd in range(2)
                ]
                for piece in range(0, 2 * self.columns, width):
                    feature = arith.addi(first, index(piece))
                    inside = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ult, feature, index(spmm.M)))
                    stored = scf.IfOp(inside)
                    with ir.InsertionPoint(stored.then_block):
                        values = vector.from_elements(vector_of(width, spmm.sum_type), mine[piece : piece + width])
                        operands.store(spmm.epilogue, values, token, feature)
                        scf.YieldOp([])
