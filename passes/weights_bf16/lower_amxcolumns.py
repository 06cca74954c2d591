"""lower-amxcolumns: lowers a `kernel.spmm` of the schedule "amxcolumns" to products of gathered columns by AMX tiles.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "amxcolumns", tile = [32]}
             : (..., tensor<3072x768xbf16, "panels(reduction=1, rows=32, width=1)">) -> ...
after    scf.parallel (%task) = ...                     // tiles of 32 tokens x chunks of the strips of the weight
         func.func private @region_tile32(...)          // see token_tile.py; or _tile16
           pack:    the tile of x, transposed, into the workspace, as columns (bf16_columns.py) or lines (bf16_pairs.py)
           for each strip of 32 rows:
             its panels with x, see amx_panel_loop.py      // 32 rows x 32 tokens of sums
             unpack:  16 rows of sums at a time, transposed, through the epilogue into y

The rows of a strip have their nonzeros in the same columns, which may lie anywhere: column vectors, narrow blocks, and V:N:M.
Wide blocks are supported for chains, whose x has this order. For a single product with them, "amx" is faster.

Fastest for column vectors: 2.2 times as fast as "blockvec" at "768x3072 16x1 90% 128 tokens bf16" in
benchmarks/results/intel-xeon-graniterapids/prediction-bf16.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, Panels
from gossamer.passes.framework.chain_product import ChainProduct, Layout, Stores
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import products, shape_of, stored_of
from gossamer.passes.loops.vectors import index
from gossamer.passes.weights.token_tile import TokenTile
from gossamer.passes.weights_bf16.amx_panel_loop import ROWS, TOKENS, tile_panels
from gossamer.passes.weights_bf16.bf16_columns import pack_columns
from gossamer.passes.weights_bf16.bf16_pairs import pack_lines
from gossamer.passes.weights_bf16.tiled_product import TiledProduct

_FEATURE = "amx"
_IN_CHAINS = 4  # vectors of tokens in a tile of a chain
_PRODUCTS, _ELEMENT, _RESULT = 180.0, 0.4, 3.0
_COLUMNS = 32  # columns of a panel
_GATHER = {1: 48.0, 2: 32.0, _COLUMNS: 0.0}  # cycles to gather the columns of a panel, by its width


def _storage(matrix: Matrix) -> Panels | None:
    """Returns strips of 16 or 32 rows whose nonzeros are in the same columns, or None."""
    if _FEATURE not in matrix.features or matrix.element != "bf16" or matrix.block is None or matrix.block[0] % ROWS:
        return None
    rows, columns = matrix.block
    return Panels(matrix.reduction, 32 if rows % 32 == 0 else 16, next(w for w in (_COLUMNS, 2, 1) if columns % w == 0))


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    fits = isinstance(stored, Panels) and stored.reduction == matrix.reduction and _FEATURE in matrix.features
    return (2 * TOKENS,) if fits and matrix.element == "bf16" else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of the products, and 0.4 (K + M) for each token of whole tiles of 32, to transpose x and y."""
    return _multiplying(matrix, tokens) + -(-tokens // 32) * _ELEMENT * (matrix.columns + matrix.rows) * 32


def _multiplying(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of the products. For every 32 tokens, a panel of R rows takes 32 R 32 / 180.

    To gather its columns takes 48 more if they are single, 32 if they come in pairs, none if they are 32 neighbours.
    """
    stored = _storage(matrix)
    if stored is None:
        return float("inf")
    panels = -(-matrix.rows // stored.rows) * max(1.0, matrix.nonzeros / matrix.fill / (matrix.rows * _COLUMNS))
    each = stored.rows * _COLUMNS * 32 / _PRODUCTS + _GATHER[stored.width]
    return -(-tokens // 32) * each * panels


def _in_chain(op: Any) -> ChainProduct:
    (rows, _), stored = shape_of(op), stored_of(op, Panels)
    layout: Layout = "columns" if stored.width == 1 else "lines"
    inner = partial(tile_panels, storage=stored)
    return ChainProduct(_IN_CHAINS * TOKENS, stored.rows, -(-rows // stored.rows), 1, layout, inner, stores=True)


def _gain_in_chains(matrix: Matrix, tokens: int) -> float:
    """A chain transposes nothing: its cycles are those of the products, and 3 for each vector of results."""
    stored = -(-tokens // 32) * _RESULT * matrix.rows * 32 / TOKENS
    return _cycles(matrix, tokens) / (_multiplying(matrix, tokens) + stored)


AMXCOLUMNS = Family("amxcolumns", _storage, _tile, _cycles, chain=_in_chain, gain=_gain_in_chains)


@dataclass(frozen=True)
class LowerAmxcolumns:
    """Lower products of gathered columns to AMX tiles."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, AMXCOLUMNS.name):
            PanelProduct(op).lower(module)


class PanelProduct(TiledProduct[Panels]):
    """A product with a weight of bf16 in panels."""

    storage_kind = Panels

    def inner(self, weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int) -> Stores:
        return tile_panels(weight, packed, vec, vectors, self.stored)

    def packed(self, tile: TokenTile, at: ir.Value) -> ir.Value:
        width = tile.vectors * TOKENS
        shape = [self.padded, width] if self.stored.width == 1 else [self.padded // 2, 2 * width]
        packed = memref.view(ir.MemRefType.get(shape, self.element), tile.operands.workspace, at, [])
        if self.stored.width == 1:
            pack_columns(tile, packed, self.padded)
        else:
            last = arith.subi(tile.operands.memory.tokens, index(1))
            pack_lines(tile.operands.x, packed, index(self.K), tile.operands.first, last, self.padded, tile.vectors)
        return packed
