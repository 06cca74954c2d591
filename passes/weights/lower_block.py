"""lower-block: lowers a `kernel.spmm` of the schedule "block" to loops in which rows of a small block share the loads of x.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "block", tile = [64, 1024], ...}
             : (..., tensor<3072x768xf32, "blocks(reduction=1, rows=4, columns=4, width=768)">) -> ...
after    the loops of row_groups.py over tiles of 64 tokens, panels of 768 columns and groups of 4 rows, and inside
           scf.for %p = %begin to %end iter_args(4 rows x 4 vectors)  // the group's blocks in the panel, see block_loop.py
             for each column of the block:                            // unrolled
               4 loads of x, shared by 4 x 4 multiply-adds

Large blocks are stored as several small ones. Runs on functions whose storage is exposed (expose-storage). Nothing is read or
written past the end of a tensor: blocks are padded with zeros, tokens past the last one repeat it and are not stored.

Fastest for blocks and many tokens: 1.15 times as fast as "blockvec" at "768x3072 4x4 90% 128 tokens" in
benchmarks/results/intel-xeon-graniterapids/prediction.json. It also runs in chains.
"""

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from torch_mlir import ir

from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Blocks, Packing
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.product import products, shape_of, stored_of
from gossamer.passes.weights.block_loop import BlockRows
from gossamer.passes.weights.row_groups import RowGroups, tokens_and_rows

_ROWS = 1024  # rows of the weight at once: so few that their sums stay in the second-level cache
_MULTIPLY, _LOAD, _START, _ELEMENT = 0.73, 0.3, 24.0, 0.31  # cycles, see _cycles
_TALLEST, _WIDEST = 6, 4  # most rows and columns of a stored block
# Bytes of a panel of x. Blocks of one or two rows need it in the first-level cache; if more rows share each load, the
# second-level cache is as good.
_PANEL = {1: 48 << 10, 2: 64 << 10}  # key: rows of a block
_WIDE_PANEL = 192 << 10  # bytes of a panel for taller blocks


def _vectors(matrix: Matrix) -> int:
    """Returns the vectors of tokens in a tile."""
    return registers(matrix.bits) // 8


def _storage(matrix: Matrix) -> Blocks | None:
    if matrix.block is None:
        return None
    rows, columns = (_divisor(size, most) for size, most in zip(matrix.block, (_TALLEST, _WIDEST), strict=True))
    return Blocks(matrix.reduction, rows, columns, _panel_width(matrix, rows, columns))


def _divisor(size: int, most: int) -> int:
    """Returns the largest divisor of `size` up to `most`."""
    return max(n for n in range(1, most + 1) if size % n == 0)


def _panel_width(matrix: Matrix, rows: int, columns: int) -> int:
    """Returns the columns of a panel of x: K in equal parts of whole blocks."""
    a_column = _vectors(matrix) * matrix.bits // 8
    panels = -(-matrix.columns * a_column // _PANEL.get(rows, _WIDE_PANEL))
    return min(-(-matrix.columns // (panels * columns)), (1 << 16) // columns) * columns


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight]."""
    return (_vectors(matrix) * matrix.lanes, _ROWS) if isinstance(stored, Blocks) else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. With R rows in a stored block, a tile of v vectors of L tokens takes the sum of

    - v (0.73 + 0.3 / R) for each of the nnz / fill stored values: its multiply-adds, and their shares of the loads of x,
    - 24 for each group of R rows and panel, to start and end its loop,
    - 0.31 (K + M) v L for the transposes.
    """
    stored = _storage(matrix)
    if stored is None:
        return inf
    rows, columns, lanes, widest = matrix.rows, matrix.columns, matrix.lanes, _vectors(matrix)
    panels = -(-columns // stored.width)
    value = matrix.nonzeros / matrix.fill * (_MULTIPLY + _LOAD / stored.rows)
    starts = _START * rows / stored.rows * panels
    full, left = divmod(tokens, widest * lanes)
    tiles = [widest] * full + ([min(v for v in (1, 2, 4) if left <= v * lanes)] if left else [])
    return sum(value * v + starts + _ELEMENT * (columns + rows) * v * lanes for v in tiles)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), stored = shape_of(op), stored_of(op, Blocks)
    groups = -(-rows // stored.rows)
    inner = partial(BlockRows, storage=stored, groups=groups)
    return ChainProduct(integers(op.tile)[0], stored.rows, groups, -(-columns // stored.width), None, inner)


BLOCK = Family("block", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class LowerBlock:
    """Lower products with small blocks to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, BLOCK.name):
            stored = stored_of(op, Blocks)
            groups = RowGroups(op, tokens_and_rows(op), stored.rows, stored.width, stored.columns)
            groups.lower(module, partial(BlockRows, storage=stored, groups=groups.number))
