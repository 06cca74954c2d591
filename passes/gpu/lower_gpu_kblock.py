"""lower-gpu-kblock: lowers a `kernel.spmm` of the schedule "gpu-kblock" to GPU kernels that stage x in shared memory.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "gpu-kblock", tile = [128, 128, 128], ...} : ...
after    gpu.func @region_t128(...)                    // and _t64, _t32 for fewer tokens and rows a block
           for each block of 128 columns:
             stage:   copy x[128 tokens][128 columns], transposed, to shared memory as [columns][tokens]
             gpu.barrier
             each warp: scf.for %round ... iter_args(8 sums of 4 tokens a lane)
               copy up to 256 nonzeros of the warp's 8 rows into its own part of shared memory
               for each of the 8 rows: for its nonzeros: vector.fma(value, x[column][lane's 4 tokens], sum)
             gpu.barrier
           the sums through the epilogue into y

Lanes have different tokens, so all lanes of a warp read the same nonzeros of a row. No thread diverges, and a column of x is
read without bank conflicts. The nonzeros of a warp's rows in a block are contiguous, so neighbouring lanes read neighbouring
ones. Nothing is read past the end of a tensor: tokens, columns and rows past the last one repeat it, and are not stored.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, gpu, memref, scf, vector

from gossamer.dialects.elements import FLOATS
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.family import Family, Matrix, entries_read
from gossamer.passes.gpu.gpu_product import GpuProduct, Operands
from gossamer.passes.loops.gpu_threads import WARP, divmod_by, load, shared, store, sync_warp, widest
from gossamer.passes.loops.product import products
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, vector_of, widened, zeros

_TOKENS, _ROWS, _COLUMNS = 128, 128, 128  # sizes of the largest tile
_WARPS = 16
_ENTRY = 8  # bytes of a nonzero in shared memory: where its column begins in the staged x, and its value
_TOGETHER = 4  # nonzeros of a row whose loads are in flight at once


def _storage(matrix: Matrix) -> Format | None:
    """Returns K-blocked CSR with 32-bit positions and 16-bit coordinates, or None if sums are not in f32."""
    if FLOATS[matrix.element].sums != "f32":
        return None
    blocked = Format.kblock(_COLUMNS)
    return blocked if matrix.reduction == 1 else blocked.permuted((1, 0))


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight, columns of K]."""
    return (_TOKENS, _ROWS, _COLUMNS) if stored == _storage(matrix) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of a multiprocessor's shared memory, the bottleneck.

    For each nonzero they are one to read it, and one for each 128 bytes of its column of x.
    """
    width = FLOATS[matrix.element].bytes
    tiles = -(-tokens // _TOKENS)
    return tiles * matrix.nonzeros * (_TOKENS * width / 128 + 1)


GPU_KBLOCK = Family("gpu-kblock", _storage, _tile, _cycles, read=entries_read)


@dataclass(frozen=True)
class LowerGpuKblock:
    """Lowers K-blocked products to gpu, scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, GPU_KBLOCK.name):
            with op.location:
                spmm = _Spmm(op)
                for vectors in (4, 2, 1):
                    tile = _Tile(spmm, vectors)
                    spmm.kernel(f"t{tile.tokens}", tile.launch, partial(_emit, tile))
                spmm.erase()


class _Spmm(GpuProduct):
    """A kernel.spmm whose weight is stored in blocks of `columns` columns."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        tile = integers(op.tile)
        if len(tile) != 3 or tile[:2] != [_TOKENS, _ROWS] or tile[2] % 8:
            raise CompileError(f"tile {tile} is not [{_TOKENS}, {_ROWS}, K] with K a multiple of 8")
        self.columns = tile[2]
        self.blocks = -(-self.K // self.columns)


class _Tile:
    """The sizes of one of the kernels. Each lane has `vectors` tokens, each warp 2 x `vectors` rows."""

    def __init__(self, spmm: _Spmm, vectors: int) -> None:
        self.spmm, self.vectors = spmm, vectors
        self.tokens, self.rows = vectors * WARP, 2 * vectors
        self.entries = self.rows * WARP  # nonzeros that a warp copies at once
        self.x_bytes = spmm.columns * self.tokens * byte_width(spmm.element)
        blocks = -(-spmm.M // (self.rows * _WARPS))
        self.launch = Launch(self.tokens, blocks, _WARPS * WARP, self.x_bytes + _WARPS * self.entries * _ENTRY)


def _emit(tile: _Tile, operands: Operands) -> None:
    _Kernel(tile, operands).emit()


class _Kernel:
    """Emits the body of one kernel."""

    def __init__(self, tile: _Tile, operands: Operands) -> None:
        self.tile, self.spmm, self.operands = tile, tile.spmm, operands
        self.positions, self.coordinates, self.values = operands.weight
        self.i32 = ir.IntegerType.get_signless(32)
        self.vec = vector_of(tile.vectors, self.spmm.sum_type)
        rows = index(tile.rows)
        self.row = arith.addi(arith.muli(operands.chunk, index(tile.rows * _WARPS)), arith.muli(operands.warp, rows))
        self.staged = shared(0, [self.spmm.columns * tile.tokens], self.spmm.element)
        self.entries = shared(tile.x_bytes, [_WARPS, tile.entries, 2], self.i32)

    def emit(self) -> None:
        with loop(index(0), index(self.spmm.blocks), index(1), [zeros(self.vec)] * self.tile.rows) as blocks:
            block = blocks.induction_variable
            self._stage(arith.muli(block, index(self.spmm.columns)))
            gpu.barrier()
            sums = self._multiply(block, list(blocks.inner_iter_args))
            gpu.barrier()
            scf.YieldOp(sums)
        self._store(list(blocks.results))

    def _stage(self, column: ir.Value) -> None:
        """Copies x transposed: staged[k][t] = x[first + t][column + k]. Neighbouring threads copy neighbouring tokens."""
        operands, tokens = self.operands, self.tile.tokens
        width = widest(self.spmm.K, self.spmm.element, 8)
        apart = self.tile.launch.threads // tokens  # vectors of columns that all threads load at once
        vectors = self.spmm.columns // width
        group, t = divmod_by(operands.thread, tokens)
        token = arith.minui(arith.addi(operands.first, t), operands.last)
        read = vector_of(width, self.spmm.element)
        rounds = -(-vectors // apart)
        at_once = next(n for n in (4, 2, 1) if rounds % n == 0)
        with loop(index(0), index(rounds), index(at_once)) as steps:
            vector_at = [
                arith.addi(arith.muli(arith.addi(steps.induction_variable, index(i)), index(apart)), group)
                for i in range(at_once)
            ]
            inside = [arith.muli(arith.minui(at, index(vectors - 1)), index(width)) for at in vector_at]
            columns = [arith.minui(arith.addi(column, k), index(self.spmm.K - width)) for k in inside]
            loaded = [load(read, operands.x, [token, k]) for k in columns]
            for k, elements in zip(inside, loaded, strict=True):
                for i in range(width):
                    at = arith.addi(arith.muli(arith.addi(k, index(i)), index(tokens)), t)
                    memref.store(vector.extract(elements, [], [i]), self.staged, [at])

    def _multiply(self, block: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus the products of the nonzeros of the warp's rows in this block."""
        rows, first = self.tile.rows, arith.muli(block, index(self.spmm.M))
        at = [arith.addi(first, arith.minui(arith.addi(self.row, index(r)), index(self.spmm.M))) for r in range(rows + 1)]
        positions = [memref.load(self.positions, [p]) for p in at]
        origin = arith.index_castui(ir.IndexType.get(), positions[0])
        # From here on, positions count from the warp's first one, so that 32 bits suffice, which saves registers.
        bounds = [arith.subi(p, positions[0]) for p in positions]
        room = self._i32(self.tile.entries)
        with loop(self._i32(0), bounds[-1], room, sums) as rounds:
            base = rounds.induction_variable
            self._copy(origin, base, bounds[-1])
            sync_warp()
            here = [arith.maxsi(arith.minsi(arith.subi(b, base), room), self._i32(0)) for b in bounds]
            added = [self._row(here[r], here[r + 1], rounds.inner_iter_args[r]) for r in range(rows)]
            sync_warp()
            scf.YieldOp(added)
        return list(rounds.results)

    def _copy(self, origin: ir.Value, base: ir.Value, end: ir.Value) -> None:
        """Copies the nonzeros [base, end) to the warp's part of shared memory, as pairs (column x tokens, value).

        The next round copies those that do not fit. Places past the last nonzero get copies of it.
        """
        last = arith.subi(end, self._i32(1))
        lane = arith.index_cast(self.i32, self.operands.lane)
        for i in range(self.tile.entries // WARP):
            entry = arith.addi(lane, self._i32(i * WARP))
            p = arith.addi(origin, self._index(arith.minsi(arith.addi(base, entry), last)))
            offset = arith.muli(load_index(self.coordinates, p), index(self.tile.tokens))
            value = widened(memref.load(self.values, [p]), self.spmm.sum_type)
            pair = [arith.index_cast(self.i32, offset), arith.bitcast(self.i32, value)]
            pair_type = vector_of(2, self.i32)
            store(vector.from_elements(pair_type, pair), self.entries, [self.operands.warp, self._index(entry), index(0)])

    def _row(self, begin: ir.Value, end: ir.Value, total: ir.Value) -> ir.Value:
        """Returns the total plus the products of nonzeros [begin, end) of shared memory, several at a time, then singly."""
        whole = arith.subi(end, arith.remui(arith.subi(end, begin), self._i32(_TOGETHER)))
        for low, high, together in ((begin, whole, _TOGETHER), (whole, end, 1)):
            with loop(low, high, self._i32(together), [total]) as nonzeros:
                at = [self._index(arith.addi(nonzeros.induction_variable, self._i32(i))) for i in range(together)]
                scf.YieldOp([self._multiply_add(at, nonzeros.inner_iter_args[0])])
            total = nonzeros.results[0]
        return total

    def _multiply_add(self, entries: list[ir.Value], total: ir.Value) -> ir.Value:
        lane_tokens = arith.muli(self.operands.lane, index(self.tile.vectors))
        read, pair = vector_of(self.tile.vectors, self.spmm.element), vector_of(2, self.i32)
        factors = []
        for entry in entries:
            loaded = load(pair, self.entries, [self.operands.warp, entry, index(0)])
            offset = arith.index_castui(ir.IndexType.get(), vector.extract(loaded, [], [0]))
            value = arith.bitcast(self.spmm.sum_type, vector.extract(loaded, [], [1]))
            factors.append((value, load(read, self.staged, [arith.addi(offset, lane_tokens)])))
        for value, x in factors:
            total = vector.fma(vector.broadcast(self.vec, value), widened(x, self.vec), total)
        return total

    def _i32(self, value: int) -> ir.Value:
        return arith.constant(self.i32, value)

    def _index(self, value: ir.Value) -> ir.Value:
        return arith.index_castui(ir.IndexType.get(), value)

    def _store(self, sums: list[ir.Value]) -> None:
        """Stores the epilogue's results into y, in the widest vectors of features that are aligned."""
        width = widest(self.spmm.M, ir.MemRefType(self.operands.out.type).element_type, self.tile.rows)
        piece_type = vector_of(width, self.spmm.sum_type)
        for v in range(self.tile.vectors):
            lane_tokens = arith.muli(self.operands.lane, index(self.tile.vectors))
            token = arith.addi(self.operands.first, arith.addi(lane_tokens, index(v)))
            exists = arith.cmpi(arith.CmpIPredicate.ult, token, self.operands.tokens)
            for r in range(0, self.tile.rows, width):
                row = arith.addi(self.row, index(r))
                inside = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.ult, row, index(self.spmm.M)))
                stored = scf.IfOp(inside)
                with ir.InsertionPoint(stored.then_block):
                    features = [vector.extract(sums[r + i], [], [v]) for i in range(width)]
                    self.operands.store(self.spmm.epilogue, vector.from_elements(piece_type, features), token, row)
                    scf.YieldOp([])
