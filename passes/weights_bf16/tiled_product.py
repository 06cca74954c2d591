"""The frame of products on AMX with a packed tile of x, whose weight (panels, or a map of tiles) is the left factor.

pack:    the tile of x into the workspace
for each strip of rows:  its sums by the inner loops; 16 rows at a time, transposed, through the epilogue into y
"""

from typing import Any, Generic, TypeVar

from torch_mlir import ir
from torch_mlir.dialects import arith, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Panels, TileMap
from gossamer.passes.framework.chain_product import Stores
from gossamer.passes.loops.product import Product, stored_of
from gossamer.passes.loops.vectors import byte_width, index, loop, reserve_workspace
from gossamer.passes.weights.token_tile import TokenTile, lower_by_tiles
from gossamer.passes.weights_bf16.amx_panel_loop import ROWS, TOKENS

Stored = TypeVar("Stored", Panels, TileMap)

_CACHE_LINE = 64


class TiledProduct(Product, Generic[Stored]):
    """A product in strips of `height` rows and tiles of `tokens`. `padded` is K rounded up to whole tiles of the weight."""

    storage_kind: type[Stored]
    stored: Stored

    def __init__(self, op: Any) -> None:
        stored, tile = stored_of(op, self.storage_kind), integers(op.tile)
        super().__init__(op, stored.rows)
        if self.lanes != ROWS or tile not in ([TOKENS], [2 * TOKENS], [4 * TOKENS]):
            raise CompileError(f"tile {tile} for vectors of {self.lanes} sums is not [16], [32] or [64] tokens for {ROWS}")
        self.tokens, self.stored = tile[0], stored
        self.height = stored.rows
        self.padded = -(-self.K // stored.columns) * stored.columns
        self.element = ir.RankedTensorType(op.w.type).element_type
        self.workspace = self.tokens * (4 * self.height + byte_width(self.element) * self.padded) + _CACHE_LINE

    def lower(self, module: ir.Module) -> None:
        """Replaces the op by loops."""
        reserve_workspace(module, self.workspace)
        lower_by_tiles(self, self.tokens, self.workspace, self._emit)

    def _emit(self, tile: TokenTile) -> None:
        """Emits the body of a function for one tile."""
        operands = tile.operands
        (sums,) = tile.scratch(self.height)
        packed = self.packed(tile, arith.addi(operands.offset, index(self.height * tile.vectors * TOKENS * 4)))
        inner = self.inner(operands.weight, packed, tile.vec, tile.vectors)
        with loop(operands.low, operands.high, index(1)) as strips:
            strip = strips.induction_variable
            inner.store(strip, sums, index(0))
            self._finish(tile, sums, arith.muli(strip, index(self.height)))

    def inner(self, weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int) -> Stores:
        """Makes the inner loops."""
        raise NotImplementedError

    def packed(self, tile: TokenTile, at: ir.Value) -> ir.Value:
        """Packs the tile of x at a place in the workspace. Returns it."""
        raise NotImplementedError

    def _finish(self, tile: TokenTile, sums: ir.Value, row: ir.Value) -> None:
        """Stores the sums of a strip through the epilogue into y."""
        if not self.epilogue.trivial:
            with loop(index(0), index(self.height), index(1)) as rows:
                slot = rows.induction_variable
                m = arith.minui(arith.addi(row, slot), index(self.M - 1))
                places = [[slot, tile.at(v)] for v in range(tile.vectors)]
                totals = tile.before([vector.load(tile.vec, sums, place) for place in places], m)
                for place, result in zip(places, totals, strict=True):
                    vector.store(result, sums, place)
        tile.unpack(sums, index(0), row, self.height)
