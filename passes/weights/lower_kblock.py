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

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import lanes_of, products, shape_of
from gossamer.passes.weights.kblock_loop import KBlockRows
from gossamer.passes.weights.panels import widest_panel
from gossamer.passes.weights.row_groups import RowGroups

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
            product = _KBlocks(op)
            product.lower(module, partial(KBlockRows, rows=product.M, columns=product.columns))


class _KBlocks(RowGroups):
    """A product in blocks of `columns` columns, row by row."""

    def __init__(self, op: Any) -> None:
        tile, lanes = integers(op.tile), lanes_of(op)
        if len(tile) != 3 or tile[0] % lanes or tile[1] % lanes:
            raise CompileError(f"tile {tile} is not [tokens, rows, K] with tokens and rows multiples of {lanes} lanes")
        self.columns = tile[2]
        super().__init__(op, (tile[0], tile[1]), 1, self.columns, 1)

    def work_before(self, row: ir.Value) -> ir.Value:
        """By nonzeros: where a row of a block starts and ends costs about as much as four."""
        return self.stored_before(row, self.panels, 4)
