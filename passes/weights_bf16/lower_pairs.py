"""lower-pairs: lowers a `kernel.spmm` of the schedule "pairs" to dot products of bf16 of two nonzeros of a row at once.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "pairs", tile = [64, 1024]}
             : (..., tensor<3072x768xbf16, "pairs(reduction=1, width=384)">) -> ...
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows, see token_tile.py
         func.func private @region_tile64(...)
           pack:    the tile of x, transposed, into the workspace as [K][64] of bf16
           for each 1024 rows, each block of 384 columns, each row:
             scf.for %p ... iter_args(4 vectors)       // the row's pairs of nonzeros in the block
               for each 32 tokens: two columns of x, interleaved by two shuffles (bf16_columns.py)
                 x86.avx512.dot(sums, the pair of weights in all lanes, 16 tokens' pairs)   // NEON's bfdot: 4 tokens'
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

The columns of the two nonzeros need not be neighbours.

Fastest for unstructured zeros and more than a few tokens on CPUs with dot products of bf16 and no AMX: 1.59 times as fast as
"broadcast" at "768x3072 90% 128 tokens bf16" in benchmarks/results/amd-epyc-znver5/prediction-bf16.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, Pairs
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import lanes_of, products, shape_of, stored_of
from gossamer.passes.loops.vectors import index
from gossamer.passes.weights.row_groups import RowGroups
from gossamer.passes.weights.token_tile import TokenTile, tile_bytes
from gossamer.passes.weights_bf16.bf16_columns import LINE, pack_columns
from gossamer.passes.weights_bf16.pair_loop import PairRows

_FEATURE = "bf16dots"
_VECTORS = 4  # vectors of tokens in a tile
_ROWS = 1024  # rows of the weight at once: so few that their sums stay in the second-level cache
_WIDEST = ((768, 0.075), (384, 0.3), (192, 1.0))  # (most columns of a block, highest density for it)
_PAIR = {1: 3.0, 2: 4.0, 4: 6.0}  # cycles by vectors of tokens
_ROW, _ELEMENT = 15.0, 0.4  # cycles, see _cycles


def _storage(matrix: Matrix) -> Pairs | None:
    if matrix.element != "bf16" or _FEATURE not in matrix.features:
        return None
    return Pairs(matrix.reduction, _block_width(matrix))


def _block_width(matrix: Matrix) -> int:
    """Returns the columns of a block: K in equal parts. The x of a block has 128 bytes for each column.

    192 columns stay in the first-level cache. But each block loads and stores the sums of a row, so sparser rows need wider
    blocks.
    """
    widest = next(width for width, densest in _WIDEST if matrix.density <= densest)
    blocks = -(-matrix.columns // widest)
    return -(-matrix.columns // (LINE * blocks)) * LINE


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens, rows of the weight]."""
    fits = isinstance(stored, Pairs) and stored.reduction == matrix.reduction and _FEATURE in matrix.features
    return (_VECTORS * matrix.lanes, _ROWS) if fits and matrix.element == "bf16" else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of all tiles. A tile of v vectors of L tokens takes the sum of

    - c(v) for each of the nnz / 2 + M blocks / 4 pairs, with padding,
    - 15 for each row and block, to start and end its loop,
    - 0.4 (K + M) v L for the transposes of x and y.
    """
    m, k, lanes = matrix.rows, matrix.columns, matrix.lanes
    starts = m * -(-k // _block_width(matrix))
    full, left = divmod(tokens, _VECTORS * lanes)
    tiles = [4] * full + ([1 if left <= lanes else 2 if left <= 2 * lanes else 4] if left else [])
    pairs = matrix.nonzeros / 2 + starts / 4
    return sum(pairs * _PAIR[v] + _ROW * starts + _ELEMENT * (k + m) * v * lanes for v in tiles)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), width = shape_of(op), stored_of(op, Pairs).width
    inner = partial(PairRows, rows=rows, width=width)
    return ChainProduct(integers(op.tile)[0], 1, rows, -(-columns // width), "columns", inner)


PAIRS = Family("pairs", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class LowerPairs:
    """Lower products of pairs of nonzeros to scf and vector."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, PAIRS.name):
            product = _Pairs(op, stored_of(op, Pairs).width)
            product.lower(module, partial(PairRows, rows=product.M, width=product.width))


class _Pairs(RowGroups):
    """A product in blocks of `width` columns, row by row. The packed x is bf16, in whole cache lines."""

    moves = False

    def __init__(self, op: Any, width: int) -> None:
        tile, lanes = integers(op.tile), lanes_of(op)
        if lanes not in (4, 16) or len(tile) != 2 or tile[0] % lanes or tile[1] % lanes:
            raise CompileError(f"tile {tile} for vectors of {lanes} sums is not [tokens, rows] in multiples of 4 or 16 lanes")
        super().__init__(op, (tile[0], tile[1]), 1, width, LINE)
        self.width, self.element = width, ir.RankedTensorType(op.w.type).element_type

    @property
    def workspace(self) -> int:
        """Bytes that a thread needs."""
        return tile_bytes(self, self.tokens, self.slots + self.padded // 2)

    def packed(self, tile: TokenTile) -> tuple[ir.Value, ir.Value]:
        """Packs x of a tile into the workspace. Returns it, and the memory for the sums."""
        (sums,), tokens = tile.scratch(self.slots), tile.vectors * tile.lanes
        after = arith.addi(tile.operands.offset, index(self.slots * tokens * 4))
        packed = memref.view(ir.MemRefType.get([self.padded, tokens], self.element), tile.operands.workspace, after, [])
        pack_columns(tile, packed, self.padded)
        return packed, sums
