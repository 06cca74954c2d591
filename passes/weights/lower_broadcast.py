"""lower-broadcast: lowers a `kernel.spmm` of the schedule "broadcast" to loops with tokens in lanes.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "broadcast", tile = [32], ...} : ... tensor<..., "padded(...)">
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows
           func.call @region_tile32(...)               // or _tile16, _tile8 for the last tokens
         func.func private @region_tile16(...)
           pack:    the tile of x, transposed, into the workspace as [K][16]
           for each panel of 1024 rows, each block of 256 columns, each row:
             scf.for %p step 4 iter_args(4 vectors)    // padded_loop.py: its nonzeros in the block, four at a time
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

The last few tokens take half a vector if that is enough. Each row has one loop, whose steps are equal. Runs on functions whose
storage is exposed (expose-storage). Nothing is read or written past the end of a tensor; tokens past the last one repeat it.

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
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.product import lanes_of, products, shape_of, stored_of
from gossamer.passes.weights.padded_loop import RowsInFours
from gossamer.passes.weights.row_groups import RowGroups

_COLUMNS = ((0.25, 256), (0.07, 384), (0.0, 768))  # (density, most columns of a block): the first below a weight's density
_IN_CHAINS = 4  # vectors of tokens in a tile of a chain
_ROWS = 1024  # rows of the weight at once: so few that their sums stay in the second-level cache
_NONZERO = {0.5: 0.9, 1.0: 1.2, 2.0: 2.25, 4.0: 4.5, 8.0: 9.0}  # cycles by vectors of tokens; four and more are not measured
_ROW, _ELEMENT = 8.0, 0.4  # cycles, see _cycles


def _storage(matrix: Matrix) -> Padded:
    """Returns blocks of about equal width. They are narrow enough for x to stay in the first-level cache, but wide enough for
    each to have some nonzeros of a row."""
    widest = next((columns for denser, columns in _COLUMNS if matrix.density > denser), _COLUMNS[-1][1])
    blocks = -(-matrix.columns // widest)
    return Padded(matrix.reduction, -(-matrix.columns // (16 * blocks)) * 16)


def _vectors(matrix: Matrix) -> int:
    """Returns the vectors of tokens in a tile. In f32, a tile has as many tokens as the target has registers."""
    return 32 * registers(matrix.bits) // matrix.bits


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (_vectors(matrix) * matrix.lanes,) if isinstance(stored, Padded) and stored.reduction == matrix.reduction else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. A tile of v vectors of L tokens takes the sum of

    - c(v) for each stored value (padding adds 1.5 values to each row of a block),
    - 8 for each row and block, to start and end its loop,
    - 0.4 (K + M) v L for the transposes of x and y.
    """
    m, k, lanes, widest = matrix.rows, matrix.columns, matrix.lanes, _vectors(matrix)
    blocks = -(-k // _storage(matrix).columns)
    full, left = divmod(tokens, widest * lanes)
    tiles = [float(widest)] * full + ([next(v for v in _NONZERO if left <= v * lanes)] if left else [])
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
    """A product in tiles of a few vectors of tokens; the last tokens may take half a vector."""

    half = True

    def __init__(self, op: Any) -> None:
        tile, lanes = integers(op.tile), lanes_of(op)
        if len(tile) != 1 or tile[0] not in (lanes, 2 * lanes, 4 * lanes, 8 * lanes):
            raise CompileError(f"tile {tile} is not one, two, four or eight vectors of {lanes} tokens")
        super().__init__(op, (tile[0], _ROWS), 1, stored_of(op, Padded).columns, 1)

    def work_before(self, row: ir.Value) -> ir.Value:
        """Counts nonzeros. To start and end a row of a block costs about as much as four of them."""
        return self.stored_before(row, self.panels, 4)
