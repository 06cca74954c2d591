"""lower-amxquads: lowers a `kernel.spmm` of the schedule "amxquads" to products of blocks of int8 by AMX, with exact sums.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "amxquads", tile = [32]}
             : (tensor<?x768xi8>, tensor<3072x768xi8, "panels(reduction=1, rows=32, width=4)">) -> tensor<?x3072xf32>
after    the loops of lower_amxcolumns.py over tiles of 32 tokens and strips of 32 rows, and inside
           for each panel of the strip:                                  // 64 columns that the strip's nonzeros are in
             copy its 16 lines of x into memory, minus the 128 that they are packed with (quad_lines.py)
             x86.amx.tile_muli(16 rows x 64 columns of the panel, 64 columns x 16 tokens, sums)      // 2 x 2 tiles of i32

Four neighbours along K are a line of x, so blocks may have any width that is a multiple of 4.

This is for int8 in blocks of at least 16 rows and 4 columns, on AMX. No recorded file has such a case.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, Panels
from gossamer.passes.framework.chain_product import ChainProduct, Stores
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import products, shape_of, stored_of
from gossamer.passes.loops.vectors import index, load_index
from gossamer.passes.weights.token_tile import TokenTile
from gossamer.passes.weights_bf16.amx_panel_loop import LINES, ROWS, TOKENS, TilePanels, memory_of_panel
from gossamer.passes.weights_bf16.tiled_product import Stored, TiledProduct
from gossamer.passes.weights_int8.byte_products import plus_128
from gossamer.passes.weights_int8.quad_lines import pack_lines

_FEATURE = "amxint8"
_QUAD, _COLUMNS = 4, 64
_IN_CHAINS = 4  # vectors of tokens in a tile of a chain
_PRODUCTS = 360.0  # products in a cycle, twice as many as with bf16
_GATHER, _ELEMENT, _RESULT = 32.0, 0.5, 3.0


def _storage(matrix: Matrix) -> Panels | None:
    """Returns strips of 16 or 32 rows whose nonzeros are in the same quads, or None."""
    if _FEATURE not in matrix.features or matrix.bits != 512 or matrix.block is None:
        return None
    rows, columns = matrix.block
    if rows % ROWS or columns % _QUAD:
        return None
    return Panels(matrix.reduction, 32 if rows % 32 == 0 else 16, _QUAD if columns % _COLUMNS else _COLUMNS)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens]."""
    return (2 * TOKENS,) if isinstance(stored, Panels) and _FEATURE in matrix.features else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of the products, and 0.5 (K + M) for each token of whole tiles of 32, to transpose x and y."""
    return _multiplying(matrix, tokens) + -(-tokens // 32) * _ELEMENT * (matrix.columns + matrix.rows) * 32


def _multiplying(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles of the products. A panel of R rows takes 64 R 32 / 360 + 32 (for its lines) for every 32 tokens."""
    stored = _storage(matrix)
    assert stored is not None
    panels = -(-matrix.rows // stored.rows) * max(1.0, matrix.nonzeros / matrix.fill / (matrix.rows * _COLUMNS))
    return -(-tokens // 32) * panels * (stored.rows * _COLUMNS * 32 / _PRODUCTS + _GATHER)


def _in_chain(op: Any) -> ChainProduct:
    """Returns how the product runs in a chain. The tile of the chain has x as bytes."""
    (rows, _), stored = shape_of(op), stored_of(op, Panels)
    inner = partial(byte_panels, storage=stored)
    return ChainProduct(_IN_CHAINS * TOKENS, stored.rows, -(-rows // stored.rows), 1, None, inner, stores=True)


def _gain_in_chains(matrix: Matrix, tokens: int) -> float:
    """A chain transposes nothing: its cycles are those of the products, and 3 for each vector of results."""
    stored = -(-tokens // 32) * _RESULT * matrix.rows * 32 / TOKENS
    return _cycles(matrix, tokens) / (_multiplying(matrix, tokens) + stored)


AMXQUADS = Family("amxquads", _storage, _tile, _cycles, chain=_in_chain, gain=_gain_in_chains, floats=False, integers=True)


@dataclass(frozen=True)
class LowerAmxquads:
    """Lower products of blocks of bytes to AMX tiles."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, AMXQUADS.name):
            _Panels(op).lower(module)


class BytePanels(TilePanels):
    """Inner loops for a weight of int8. x is packed as lines with 128 added (quad_lines.py)."""

    def line(self, panel: ir.Value, number: ir.Value, vectors: range) -> list[ir.Value]:
        if self.storage.width == _QUAD:
            lines = super().line(panel, number, vectors)
        else:
            first = arith.muli(load_index(self.coordinates, panel), index(LINES))
            lines = self.lines_at(arith.addi(first, number), vectors)
        return [plus_128(line) for line in lines]  # adding 128 once more removes it


def byte_panels(
    weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int, storage: Panels
) -> BytePanels:
    """Returns the inner loops. Call it in the first block of a function: it allocates memory for the lines of a panel."""
    return BytePanels(weight, packed, vec, vectors, storage, memory_of_panel(packed, vectors, storage))


class TiledBytes(TiledProduct[Stored]):
    """A product of bytes, whose x is packed as quads."""

    def packed(self, tile: TokenTile, at: ir.Value) -> ir.Value:
        lines = ir.MemRefType.get([self.padded // _QUAD, _QUAD * tile.vectors * TOKENS], self.element)
        packed = memref.view(lines, tile.operands.workspace, at, [])
        pack_lines(tile, packed, self.K, words=False)
        return packed


class _Panels(TiledBytes[Panels]):
    storage_kind = Panels

    def inner(self, weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int) -> Stores:
        return byte_panels(weight, packed, vec, vectors, self.stored)
