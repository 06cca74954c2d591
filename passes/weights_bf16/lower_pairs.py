"""lower-pairs: a `kernel.spmm` of the schedule "pairs" multiplies two nonzeros of a row at once, by dot products of bf16.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "pairs", tile = [64, 1024]}
             : (..., tensor<3072x768xbf16, "pairs(reduction=1, width=384)">) -> ...
after    scf.parallel (%task) = ...                    // token tiles x chunks of the weight's rows, see token_tile.py
         func.func private @region_tile64(...)
           pack:    the tile of x, transposed, into the workspace as [K][64] of bf16
           for each 1024 rows, each block of 384 columns, each row:
             scf.for %p ... iter_args(4 vectors)       // the row's pairs of nonzeros in the block
               for each 32 tokens: two columns of x, interleaved by two shuffles (bf16_columns.py)
                 x86.avx512.dot(sums, the pair of weights in all lanes, 16 tokens' pairs)
           unpack:  16 rows of sums at a time, transposed, through the epilogue into y

The two columns need not be neighbours.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, Pairs
from gossamer.passes.framework.chain_product import ChainProduct
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Product, products, shape_of, stored_of
from gossamer.passes.loops.vectors import index, loop, reserve_workspace, zeros
from gossamer.passes.weights.token_tile import TokenTile, lower_by_tiles, tile_bytes
from gossamer.passes.weights_bf16.bf16_columns import LINE, pack_columns
from gossamer.passes.weights_bf16.pair_loop import PairRows

_FEATURE = "avx512bf16"
_LANES = 16
_VECTORS = 4  # vectors of tokens in a tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_WIDEST = ((768, 0.075), (384, 0.3), (192, 1.0))  # columns of a block, by the density up to which
_PAIR = {1: 3.0, 2: 4.0, 4: 6.0}  # cycles by vectors of tokens
_ROW, _ELEMENT = 15.0, 0.4


def _storage(matrix: Matrix) -> Pairs | None:
    if matrix.element != "bf16" or _FEATURE not in matrix.features:
        return None
    return Pairs(matrix.reduction, _block_width(matrix))


def _block_width(matrix: Matrix) -> int:
    """Columns of a block: K in equal parts, under each of which lies a panel of x of 128 bytes a column.

    192 columns stay in the first-level cache, but the sums of a row are loaded and stored once a block: the sparser the
    row, the wider the block that pays.
    """
    widest = next(width for width, densest in _WIDEST if matrix.density <= densest)
    blocks = -(-matrix.columns // widest)
    return -(-matrix.columns // (LINE * blocks)) * LINE


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens, rows of the weight]"""
    fits = isinstance(stored, Pairs) and stored.reduction == matrix.reduction and _FEATURE in matrix.features
    return (_VECTORS * _LANES, _ROWS) if fits and matrix.element == "bf16" else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Per tile of v vectors of tokens: (nnz / 2 + M blocks / 4) c(v) for the pairs, filled up; 15 M blocks for starts and ends
    of rows; 0.4 (K + M) v L for the transposes of x and y."""
    m, k = matrix.rows, matrix.columns
    starts = m * -(-k // _block_width(matrix))
    full, left = divmod(tokens, _VECTORS * _LANES)
    tiles = [4] * full + ([1 if left <= _LANES else 2 if left <= 2 * _LANES else 4] if left else [])
    pairs = matrix.nonzeros / 2 + starts / 4
    return sum(pairs * _PAIR[v] + _ROW * starts + _ELEMENT * (k + m) * v * _LANES for v in tiles)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), width = shape_of(op), stored_of(op, Pairs).width
    inner = partial(PairRows, rows=rows, width=width)
    return ChainProduct(integers(op.tile)[0], 1, rows, -(-columns // width), "columns", inner)


PAIRS = Family("pairs", _storage, _tile, _cycles, chain=_in_chain)


@dataclass(frozen=True)
class LowerPairs:
    """Lower products of pairs of nonzeros to scf and vector."""

    name: ClassVar[str] = "lower-pairs"

    def run(self, module: ir.Module) -> None:
        for op in products(module, PAIRS.name):
            pairs = _Pairs(op)
            reserve_workspace(module, pairs.workspace)
            lower_by_tiles(pairs, pairs.tokens, pairs.workspace, pairs.emit)


class _Pairs(Product):
    """A product in tiles of `tokens`, `rows` rows of the weight at a time, in blocks of `width` columns.

    padded  K, filled up to whole cache lines of x
    """

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        stored, tile = stored_of(op, Pairs), integers(op.tile)
        if self.lanes != _LANES or len(tile) != 2 or tile[0] % _LANES or tile[1] % _LANES:
            raise CompileError(f"tile {tile} for vectors of {self.lanes} sums is not [tokens, rows] in multiples of {_LANES}")
        self.tokens, self.width = tile[0], stored.width
        self.element = ir.RankedTensorType(op.w.type).element_type
        self.blocks = -(-self.K // self.width)
        self.rows = min(tile[1], self.groups * _LANES)
        self.padded = -(-self.K // LINE) * LINE
        self.workspace = tile_bytes(self, self.tokens, self.rows + self.padded // 2)

    def emit(self, tile: TokenTile) -> None:
        """The body of a function for one tile."""
        (sums,) = tile.scratch(self.rows)
        after = arith.addi(tile.operands.offset, index(self.rows * tile.vectors * _LANES * 4))
        packed = memref.view(
            ir.MemRefType.get([self.padded, tile.vectors * _LANES], self.element), tile.operands.workspace, after, []
        )
        pack_columns(tile, packed, self.padded)
        nonzeros = PairRows(tile.operands.weight, packed, tile.vec, tile.vectors, self.M, self.width)
        low, high, step = tile.operands.low, tile.operands.high, index(self.rows // _LANES)
        with loop(low, high, step) as chunks:
            start = chunks.induction_variable
            end = arith.minui(arith.addi(start, step), high)
            origin = arith.muli(start, index(_LANES))
            with loop(index(0), index(self.blocks), index(1)) as blocks:
                block = blocks.induction_variable
                last = arith.cmpi(arith.CmpIPredicate.eq, block, index(self.blocks - 1))
                with loop(start, end, index(1)) as groups:
                    row = arith.muli(groups.induction_variable, index(_LANES))
                    with loop(row, arith.minui(arith.addi(row, index(_LANES)), index(self.M)), index(1)) as rows:
                        m = rows.induction_variable
                        self._row(tile, nonzeros, sums, block, m, arith.subi(m, origin), last)
                    finished = scf.IfOp(last)
                    with ir.InsertionPoint(finished.then_block):
                        tile.unpack(sums, arith.subi(row, origin), row)
                        scf.YieldOp([])

    def _row(
        self, tile: TokenTile, nonzeros: PairRows, sums: ir.Value, block: ir.Value, m: ir.Value, slot: ir.Value, last: ir.Value
    ) -> None:
        """Add what the row's nonzeros in this block of columns contribute; in the last block, start the epilogue."""
        types = [tile.vec] * tile.vectors
        places = [[slot, tile.at(v)] for v in range(tile.vectors)]
        start = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, block, index(0)), types, has_else=True)
        with ir.InsertionPoint(start.then_block):
            scf.YieldOp([zeros(tile.vec)] * tile.vectors)
        with ir.InsertionPoint(start.else_block):
            scf.YieldOp([vector.load(tile.vec, sums, place) for place in places])
        totals = nonzeros.add(block, m, list(start.results))
        if not self.epilogue.trivial:
            finish = scf.IfOp(last, types, has_else=True)
            with ir.InsertionPoint(finish.then_block):
                scf.YieldOp(tile.before(totals, m))
            with ir.InsertionPoint(finish.else_block):
                scf.YieldOp(totals)
            totals = list(finish.results)
        for place, total in zip(places, totals, strict=True):
            vector.store(total, sums, place)
