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
from torch_mlir.dialects import arith, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Product, products, shape_of
from gossamer.passes.loops.vectors import index, loop, reserve_workspace, zeros
from gossamer.passes.weights.kblock_loop import KBlockRows
from gossamer.passes.weights.panels import widest_panel
from gossamer.passes.weights.token_tile import TokenTile, lower_by_tiles, tile_bytes

_VECTORS = 4  # vectors of tokens in a register tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_NONZERO = {1: 2.0, 2: 2.7, 4: 4.0}  # cycles by vectors of tokens
_ROW, _ELEMENT = 24.0, 0.4


def _storage(matrix: Matrix) -> Format:
    """K-blocked CSR with 32-bit positions and 16-bit coordinates."""
    return _k_blocked(matrix, _block_width(matrix))


def _k_blocked(matrix: Matrix, columns: int) -> Format:
    blocked = Format.kblock(columns)
    return blocked if matrix.reduction == 1 else blocked.permuted((1, 0))


def _block_width(matrix: Matrix) -> int:
    """Columns of a block, equally many in all as far as whole vectors allow."""
    blocks = -(-matrix.columns // widest_panel(matrix, _VECTORS))
    return max(16, -(-matrix.columns // (16 * blocks)) * 16)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens, rows of the weight, columns of K]"""
    columns = stored.levels[0].block if isinstance(stored, Format) else 1
    return (_VECTORS * matrix.lanes, _ROWS, columns) if columns > 1 and stored == _k_blocked(matrix, columns) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of v vectors of tokens: nnz c(v), bound by loads; 24 M blocks for starts and ends of rows; 0.4 (K + M) v L for
    the transposes of x and y."""
    m, k, lanes = matrix.rows, matrix.columns, matrix.lanes
    blocks = -(-k // _block_width(matrix))
    full, left = divmod(tokens, 4 * lanes)
    tiles = [4] * full + ([1 if left <= lanes else 2 if left <= 2 * lanes else 4] if left else [])
    a_row = _ROW * m * blocks
    return sum(matrix.nonzeros * _NONZERO[v] + a_row + _ELEMENT * (k + m) * v * lanes for v in tiles)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), (tokens, _, width) = shape_of(op), integers(op.tile)
    return ChainProduct(tokens, 1, rows, -(-columns // width), None, partial(KBlockRows, rows=rows, columns=width))


KBLOCK = Family("kblock", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class LowerKblock:
    """Lower K-blocked products to scf and vector."""

    name: ClassVar[str] = "lower-kblock"

    def run(self, module: ir.Module) -> None:
        for op in products(module, KBLOCK.name):
            spmm = _Spmm(op)
            reserve_workspace(module, spmm.workspace)
            lower_by_tiles(spmm, spmm.tokens, spmm.workspace, partial(_emit, spmm))


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
        self.workspace = tile_bytes(self, self.tokens, self.padded_K + self.rows)

    def work_before(self, row: ir.Value) -> ir.Value:
        """By nonzeros: where a row of a block starts and ends costs about as much as four."""
        return self.stored_before(row, self.blocks, 4)


def _emit(spmm: _Spmm, tile: TokenTile) -> None:
    """The body of a function for one tile."""
    lanes, (low, high) = index(spmm.lanes), (tile.operands.low, tile.operands.high)
    packed, sums = tile.scratch(spmm.padded_K, spmm.rows)
    tile.pack(packed, spmm.padded_K)
    nonzeros = KBlockRows(tile.operands.weight, packed, tile.vec, tile.vectors, spmm.M, spmm.columns)
    step = index(spmm.rows // spmm.lanes)
    with loop(low, high, step) as panels:
        panel = panels.induction_variable
        panel_end = arith.minui(arith.addi(panel, step), high)
        origin = arith.muli(panel, lanes)
        with loop(index(0), index(spmm.blocks), index(1)) as blocks:
            block = blocks.induction_variable
            last = arith.cmpi(arith.CmpIPredicate.eq, block, index(spmm.blocks - 1))
            with loop(panel, panel_end, index(1)) as groups:
                row = arith.muli(groups.induction_variable, lanes)
                row_end = arith.minui(arith.addi(row, lanes), index(spmm.M))
                with loop(row, row_end, index(1)) as rows:
                    m = rows.induction_variable
                    _row(tile, nonzeros, sums, block, m, arith.subi(m, origin), last)
                finished = scf.IfOp(last)
                with ir.InsertionPoint(finished.then_block):
                    tile.unpack(sums, arith.subi(row, origin), row)
                    scf.YieldOp([])


def _row(
    tile: TokenTile, nonzeros: KBlockRows, sums: ir.Value, block: ir.Value, m: ir.Value, slot: ir.Value, last: ir.Value
) -> None:
    """Add what the row's nonzeros in this block of columns contribute; in the last block, start the epilogue."""
    types, places = [tile.vec] * tile.vectors, [tile.at(v) for v in range(tile.vectors)]
    start = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, block, index(0)), types, has_else=True)
    with ir.InsertionPoint(start.then_block):
        scf.YieldOp([zeros(tile.vec)] * tile.vectors)
    with ir.InsertionPoint(start.else_block):
        scf.YieldOp([vector.load(tile.vec, sums, [slot, t]) for t in places])
    totals = nonzeros.add(block, m, list(start.results))
    if not tile.product.epilogue.trivial:
        finish = scf.IfOp(last, types, has_else=True)
        with ir.InsertionPoint(finish.then_block):
            scf.YieldOp(tile.before(totals, m))
        with ir.InsertionPoint(finish.else_block):
            scf.YieldOp(totals)
        totals = list(finish.results)
    for t, total in zip(places, totals, strict=True):
        vector.store(total, sums, [slot, t])
