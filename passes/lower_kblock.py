"""lower-kblock: a `kernel.spmm` of the schedule "kblock" becomes loops over vectors, register-tiled over tokens.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "kblock", tile = [64, 1024, 192], ...} : ...
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
           func.call @region_tile64(...)               // or _tile32, _tile16 for what is left of the tokens
         func.func private @region_tile64(...)
           pack:    the tile of x, transposed, into the workspace as [K][64]
           for each panel of 1024 rows, each block of 192 columns, each row:
             scf.for %p ... iter_args(4 vectors)       // the row's nonzeros in the block
               vector.fma(values[p], x[coordinates[p]][0..63], sums)
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

Runs on functions whose storage is exposed (expose-storage). Nothing is read or written past the end of a tensor: what is
left of K and of the rows is masked, tokens past the last one repeat it and are not stored.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing
from gossamer.passes.family import Family, Matrix
from gossamer.passes.kblock_rows import KBlockRows
from gossamer.passes.product import Operands, Product, products
from gossamer.passes.vectors import (
    byte_width,
    index,
    loop,
    mask_of,
    narrowed,
    reserve_workspace,
    transpose,
    vector_of,
    widened,
    zeros,
)

_CACHE_LINE = 64
_VECTORS = 4  # vectors of tokens in a register tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_NONZERO = {1: 2.0, 2: 2.7, 4: 4.0}  # cycles by vectors of tokens
_ROW, _ELEMENT = 15.0, 0.4


def _storage(matrix: Matrix) -> Format:
    """K-blocked CSR with 32-bit positions and 16-bit coordinates."""
    return _k_blocked(matrix, block_width(matrix.rows, matrix.columns, matrix.density))


def _k_blocked(matrix: Matrix, columns: int) -> Format:
    blocked = Format.kblock(columns)
    return blocked if matrix.reduction == 1 else blocked.permuted((1, 0))


def block_width(rows: int, size: int, density: float) -> int:
    """Columns of a block of a weight with `rows` rows, summed over `size`.

    Under a block lies a panel of x of 256 bytes a column: 192 columns stay in the first-level cache. But the sums of a
    row are loaded and stored once a block, which pays for many sparse rows in wider blocks.
    """
    widest = 384 if density <= 0.15 and rows >= 768 else 192
    blocks = -(-size // widest)
    return max(16, -(-size // (16 * blocks)) * 16)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens, rows of the weight, columns of K]"""
    columns = stored.levels[0].block if isinstance(stored, Format) else 1
    return (_VECTORS * matrix.lanes, _ROWS, columns) if columns > 1 and stored == _k_blocked(matrix, columns) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of v vectors of tokens: nnz c(v), bound by loads; 15 M blocks for starts and ends of rows; 0.4 (K + M) v L for
    the transposes of x and y."""
    m, k, lanes = matrix.rows, matrix.columns, matrix.lanes
    blocks = -(-k // block_width(m, k, matrix.density))
    full, left = divmod(tokens, 4 * lanes)
    tiles = [4] * full + ([1 if left <= lanes else 2 if left <= 2 * lanes else 4] if left else [])
    a_row = _ROW * m * blocks
    return sum(matrix.nonzeros * _NONZERO[v] + a_row + _ELEMENT * (k + m) * v * lanes for v in tiles)


KBLOCK = Family("kblock", "lower-chain,lower-kblock", _storage, _tile, _cycles)


@dataclass(frozen=True)
class LowerKblock:
    """Lower K-blocked products to scf and vector."""

    name: ClassVar[str] = "lower-kblock"

    def run(self, module: ir.Module) -> None:
        for op in products(module, KBLOCK.name):
            spmm = _Spmm(op)
            reserve_workspace(module, spmm.workspace)
            _lower(spmm)


class _Spmm(Product):
    """A kernel.spmm, tiled by `tokens`, `rows` of the weight and `columns` of K."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        tile = integers(op.tile)
        if len(tile) != 3 or tile[0] % self.lanes or tile[1] % self.lanes:
            raise CompileError(f"tile {tile} is not [tokens, rows, K] with tokens and rows multiples of {self.lanes} lanes")
        self.tokens, rows, self.columns = tile
        self.blocks = -(-self.K // self.columns)
        self.rows = min(rows, self.groups * self.lanes)
        self.padded_K = -(-self.K // self.lanes) * self.lanes

    @property
    def workspace(self) -> int:
        """Bytes a thread needs: the packed tile of x and the sums of a panel of rows."""
        size = (self.padded_K + self.rows) * self.tokens * byte_width(self.sum_type)
        return -(-size // _CACHE_LINE) * _CACHE_LINE + _CACHE_LINE


def _lower(spmm: _Spmm) -> None:
    lanes = spmm.lanes
    widths = [v for v in (4, 2, 1) if v * lanes <= spmm.tokens]
    with spmm.op.location:
        tiles = {v * lanes: spmm.function(f"tile{v * lanes}", partial(_emit_tile, spmm, v)) for v in widths}
        with ir.InsertionPoint(spmm.op):
            tile = index(spmm.tokens)
            n_tiles = arith.ceildivui(memref.dim(spmm.storage.output, index(0)), tile)
            # With fewer token tiles than threads, the rows of the weight are shared out too.
            chunks = arith.ceildivui(spmm.storage.threads, arith.maxui(n_tiles, index(1)))
            chunks = arith.minui(index(spmm.groups), chunks)

            def body(task: ir.Value, offset: ir.Value) -> None:
                first = arith.muli(arith.divui(task, chunks), tile)
                spmm.call(tiles, offset, first, *spmm.row_range(arith.remui(task, chunks), chunks))

            spmm.parallel(arith.muli(n_tiles, chunks), spmm.workspace, body)
    spmm.storage.erase()


def _emit_tile(spmm: _Spmm, vectors: int, operands: Operands) -> None:
    _Tile(spmm, vectors, operands).emit()


class _Tile:
    """Emits the body of a function that computes `vectors` x lanes tokens."""

    def __init__(self, spmm: _Spmm, vectors: int, operands: Operands) -> None:
        self.spmm, self.lanes, self.vectors = spmm, spmm.lanes, vectors
        self.operands, self.memory = operands, operands.memory
        self.vec = vector_of(self.lanes, spmm.sum_type)
        self.at = [index(v * self.lanes) for v in range(vectors)]

    def emit(self) -> None:
        spmm, lanes = self.spmm, index(self.lanes)
        packed, sums = self._scratch()
        self._pack(packed)
        step = index(spmm.rows // self.lanes)
        with loop(self.operands.low, self.operands.high, step) as panels:
            panel = panels.induction_variable
            panel_end = arith.minui(arith.addi(panel, step), self.operands.high)
            origin = arith.muli(panel, lanes)
            with loop(index(0), index(spmm.blocks), index(1)) as blocks:
                block = blocks.induction_variable
                last = arith.cmpi(arith.CmpIPredicate.eq, block, index(spmm.blocks - 1))
                with loop(panel, panel_end, index(1)) as groups:
                    row = arith.muli(groups.induction_variable, lanes)
                    row_end = arith.minui(arith.addi(row, lanes), index(spmm.M))
                    with loop(row, row_end, index(1)) as rows:
                        m = rows.induction_variable
                        self._row(packed, sums, block, m, arith.subi(m, origin), last)
                    finished = scf.IfOp(last)
                    with ir.InsertionPoint(finished.then_block):
                        self._unpack(sums, arith.subi(row, origin), row)
                        scf.YieldOp([])

    def _scratch(self) -> tuple[ir.Value, ir.Value]:
        """This thread's part of the workspace: x packed as [K][tokens], and sums as [rows][tokens]."""
        spmm, width = self.spmm, self.vectors * self.lanes
        k_by_t = ir.MemRefType.get([spmm.padded_K, width], spmm.sum_type)
        m_by_t = ir.MemRefType.get([spmm.rows, width], spmm.sum_type)
        packed = memref.view(k_by_t, self.operands.workspace, self.operands.offset, [])
        after = arith.addi(self.operands.offset, index(spmm.padded_K * width * byte_width(spmm.sum_type)))
        return packed, memref.view(m_by_t, self.operands.workspace, after, [])

    def _pack(self, packed: ir.Value) -> None:
        """x[first + t, k] -> packed[k, t]; tokens past the last one repeat it."""
        lanes, narrow = self.lanes, vector_of(self.lanes, ir.MemRefType(self.operands.x.type).element_type)
        columns, last = index(self.spmm.K), arith.subi(self.memory.tokens, index(1))
        with loop(index(0), columns, index(lanes)) as ks:
            k = ks.induction_variable
            mask = mask_of(lanes, arith.subi(columns, k))
            for t in range(self.vectors):
                start = arith.addi(self.operands.first, self.at[t])
                rows = []
                for r in range(lanes):
                    token = arith.minui(arith.addi(start, index(r)), last)
                    loaded = vector.maskedload(narrow, self.operands.x, [token, k], mask, zeros(narrow))
                    rows.append(widened(loaded, self.vec))
                for r, column in enumerate(transpose(rows)):
                    vector.store(column, packed, [arith.addi(k, index(r)), self.at[t]])

    def _row(self, packed: ir.Value, sums: ir.Value, block: ir.Value, m: ir.Value, slot: ir.Value, last: ir.Value) -> None:
        """Add what the row's nonzeros in this block of columns contribute; in the last block, start the epilogue."""
        spmm, types = self.spmm, [self.vec] * self.vectors
        start = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, block, index(0)), types, has_else=True)
        with ir.InsertionPoint(start.then_block):
            scf.YieldOp([zeros(self.vec)] * self.vectors)
        with ir.InsertionPoint(start.else_block):
            scf.YieldOp([vector.load(self.vec, sums, [slot, t]) for t in self.at])
        operands = self.operands
        weight = operands.positions, operands.coordinates, operands.values
        nonzeros = KBlockRows(spmm.M, spmm.columns, *weight, packed, self.vec, self.vectors)
        totals = nonzeros.add(block, m, list(start.results))
        if not spmm.epilogue.trivial:
            finish = scf.IfOp(last, types, has_else=True)
            with ir.InsertionPoint(finish.then_block):
                read = self.memory.by_feature(m)
                scf.YieldOp([widened(spmm.epilogue.before(t, read), self.vec) for t in totals])
            with ir.InsertionPoint(finish.else_block):
                scf.YieldOp(totals)
            totals = list(finish.results)
        for t, total in zip(self.at, totals, strict=True):
            vector.store(total, sums, [slot, t])

    def _unpack(self, sums: ir.Value, slot: ir.Value, row: ir.Value) -> None:
        """sums[slot + i, t] -> out[first + t, row + i] through the rest of the epilogue, for one group of rows."""
        lanes, epilogue = self.lanes, self.spmm.epilogue
        crossing = vector_of(lanes, epilogue.crossing.type)
        for t in range(self.vectors):
            group = [vector.load(self.vec, sums, [arith.addi(slot, index(r)), self.at[t]]) for r in range(lanes)]
            for r, values in enumerate(transpose(group)):
                token = arith.addi(self.operands.first, index(t * lanes + r))
                finish = partial(epilogue.after, narrowed(values, crossing))
                self.memory.store_token(token, row, lanes, finish)
