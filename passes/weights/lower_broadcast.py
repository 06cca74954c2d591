"""lower-broadcast: a `kernel.spmm` of the schedule "broadcast" becomes loops with tokens in lanes.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "broadcast", tile = [32], ...} : ... tensor<..., "padded(...)">
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
           func.call @region_tile32(...)               // or _tile16, _tile8 for what is left of the tokens
         func.func private @region_tile16(...)
           pack:    the tile of x, transposed, into the workspace as [K][16]
           for each panel of 1024 rows, each block of 256 columns, each row:
             scf.for %p step 4 iter_args(4 vectors)    // padded_loop.py: its nonzeros in the block, four at a time
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

Half a vector for no more tokens than that; one loop a row, of equal steps. Runs on functions whose storage is exposed
(expose-storage). Nothing is read or written past the end of a tensor; tokens past the last one repeat it.

Fastest for unstructured zeros and many tokens: 3.4 times as fast as "rowpairs" at "768x3072 skewed 90% 128 tokens" in
benchmarks/results/amd-epyc-znver4/prediction.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, Padded
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import lanes_of, products, shape_of, stored_of
from gossamer.passes.weights.padded_loop import RowsInFours
from gossamer.passes.weights.row_groups import RowGroups

_COLUMNS = ((0.25, 256), (0.07, 384), (0.0, 768))  # columns of a block at most, for weights denser than this
_IN_CHAINS = 4  # vectors of tokens of a tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_NONZERO = {0.5: 0.9, 1.0: 1.2, 2.0: 2.25}  # cycles by vectors of tokens
_ROW, _ELEMENT = 8.0, 0.4


def _storage(matrix: Matrix) -> Padded:
    """Blocks as equal as can be: narrow, for x stays in the first-level cache, but each with some nonzeros of a row."""
    widest = next((columns for denser, columns in _COLUMNS if matrix.density > denser), _COLUMNS[-1][1])
    blocks = -(-matrix.columns // widest)
    return Padded(matrix.reduction, -(-matrix.columns // (16 * blocks)) * 16)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens]"""
    return (2 * matrix.lanes,) if isinstance(stored, Padded) and stored.reduction == matrix.reduction else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of v vectors of tokens: c(v) a nonzero, of which a row gets 1.5 more in every block to fill up; 8 M blocks for
    starts and ends of rows; 0.4 (K + M) v L for the transposes of x and y."""
    m, k, lanes = matrix.rows, matrix.columns, matrix.lanes
    blocks = -(-k // _storage(matrix).columns)
    full, left = divmod(tokens, 2 * lanes)
    tiles = [2.0] * full + ([0.5 if 2 * left <= lanes else 1.0 if left <= lanes else 2.0] if left else [])
    stored = matrix.nonzeros + 1.5 * m * blocks
    return sum(stored * _NONZERO[v] + _ROW * m * blocks + _ELEMENT * (k + m) * v * lanes for v in tiles)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), lanes, stored = shape_of(op), lanes_of(op), stored_of(op, Padded)
    inner = partial(RowsInFours, groups=rows, columns=stored.columns, lanes=lanes)
    return ChainProduct(_IN_CHAINS * lanes, 1, rows, -(-columns // stored.columns), None, inner)


BROADCAST = Family("broadcast", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class LowerBroadcast:
    """Lower products of padded rows to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, BROADCAST.name):
            product, columns = _PaddedProduct(op), stored_of(op, Padded).columns
            product.lower(module, partial(RowsInFours, groups=product.M, columns=columns, lanes=product.lanes))


class _PaddedProduct(RowGroups):
    """A product in tiles of one or two vectors of tokens, or half a vector of the last ones."""

    half = True

    def __init__(self, op: Any) -> None:
        tile, lanes = integers(op.tile), lanes_of(op)
        if tile not in ([lanes], [2 * lanes]):
            raise CompileError(f"tile {tile} is not one or two vectors of {lanes} tokens")
        super().__init__(op, (tile[0], _ROWS), 1, stored_of(op, Padded).columns, 1)

    def work_before(self, row: ir.Value) -> ir.Value:
        """By nonzeros: where a row of a block starts and ends costs about as much as four."""
        return self.stored_before(row, self.panels, 4)
