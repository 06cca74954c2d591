"""lower-amxcolumns: a `kernel.spmm` of the schedule "amxcolumns" multiplies gathered columns of bf16 by AMX's tiles.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "amxcolumns", tile = [32]}
             : (..., tensor<3072x768xbf16, "panels(reduction=1, rows=32)">) -> ...
after    scf.parallel (%task) = ...                     // tiles of 32 tokens x chunks of the strips of the weight
         func.func private @region_tile32(...)          // see token_tile.py; or _tile16
           pack:    the tile of x, transposed, into the workspace as [K + 1][32] of bf16, the last one zeros
           for each strip of 32 rows:
             for each panel of 32 of its columns:       iter_args(2 x 2 tiles of sums)
               the panel's columns of x, interleaved two by two, into the workspace      // see columns.py
               x86.amx.tile_mulf(16 rows x 32 columns of the panel, 32 columns x 16 tokens, sums)
             x86.amx.tile_store the sums
             unpack:  16 rows of sums at a time, transposed, through the epilogue into y

The rows of a strip have their nonzeros in the same columns, which may lie anywhere: column vectors, narrow blocks, and V:N:M.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import integers
from gossamer.dialects.packing import Packing, Panels
from gossamer.passes.columns import LINE, pack_columns, pairs_of
from gossamer.passes.encodings import storage_of_type
from gossamer.passes.family import Family, Matrix
from gossamer.passes.product import Product, products
from gossamer.passes.token_tile import TokenTile, lower_by_tiles
from gossamer.passes.vectors import index, load_index, loop, reserve_workspace

_FEATURE = "amx"
_ROWS, _COLUMNS, _TOKENS = 16, Panels.COLUMNS, 16  # of a tile
_CACHE_LINE = 64
_PANEL, _ELEMENT = 80.0, 0.4


def _storage(matrix: Matrix) -> Panels | None:
    """Strips of 16 or 32 rows whose nonzeros are in the same columns."""
    if _FEATURE not in matrix.features or matrix.element != "bf16" or matrix.block is None or matrix.block[0] % _ROWS:
        return None
    return Panels(matrix.reduction, 32 if matrix.block[0] % 32 == 0 else 16)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """[tokens]"""
    fits = isinstance(stored, Panels) and stored.reduction == matrix.reduction and _FEATURE in matrix.features
    return (2 * _TOKENS,) if fits and matrix.element == "bf16" else None


def _cycles(matrix: Matrix, tokens: int) -> float:
    """For every 32 tokens: 80 a panel; 0.4 (K + M) 32 for the transposes of x and y."""
    stored = _storage(matrix)
    rows = stored.rows if stored else _ROWS
    panels = -(-matrix.rows // rows) * max(1.0, matrix.nonzeros / matrix.fill / (matrix.rows * _COLUMNS))
    return -(-tokens // 32) * (_PANEL * panels + _ELEMENT * (matrix.columns + matrix.rows) * 32)


AMXCOLUMNS = Family("amxcolumns", "lower-amxcolumns", _storage, _tile, _cycles)


@dataclass(frozen=True)
class LowerAmxcolumns:
    """Lower products of gathered columns to tiles."""

    name: ClassVar[str] = "lower-amxcolumns"

    def run(self, module: ir.Module) -> None:
        for op in products(module, AMXCOLUMNS.name):
            panels = _Panels(op)
            reserve_workspace(module, panels.workspace)
            lower_by_tiles(panels, panels.tokens, panels.workspace, panels.emit)


class _Panels(Product):
    """A product in strips of `height` rows and tiles of `tokens`; `padded` is K, filled up to whole lines of x."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        stored = storage_of_type(ir.RankedTensorType(op.w.type))
        tile = integers(op.tile)
        if not isinstance(stored, Panels) or self.lanes != _ROWS:
            raise CompileError(f"a weight stored as {stored} is not stored in panels for vectors of {_ROWS} sums")
        if tile not in ([_TOKENS], [2 * _TOKENS]):
            raise CompileError(f"tile {tile} is not [16] or [32] tokens")
        (self.tokens,) = tile
        self.height, self.halves = stored.rows, stored.rows // _ROWS
        self.groups = -(-self.M // self.height)
        self.padded = -(-self.K // _COLUMNS) * _COLUMNS
        self.element = ir.RankedTensorType(op.w.type).element_type
        self.workspace = self.tokens * (4 * self.height + 2 * _COLUMNS + 2 * (self.padded + 1)) + _CACHE_LINE

    def emit(self, tile: TokenTile) -> None:
        """The body of a function for one tile."""
        (sums,) = tile.scratch(self.height)
        at, buffers = arith.addi(tile.operands.offset, index(self.height * tile.vectors * _TOKENS * 4)), []
        width = tile.vectors * _TOKENS
        for shape in ([tile.vectors, _COLUMNS // 2, LINE], [self.padded + 1, width]):
            buffers.append(memref.view(ir.MemRefType.get(shape, self.element), tile.operands.workspace, at, []))
            at = arith.addi(at, index(tile.vectors * _COLUMNS // 2 * LINE * 2))
        gathered, packed = buffers
        pack_columns(tile, packed, self.padded)
        for v in range(tile.vectors):
            nothing = ir.VectorType.get([_TOKENS], self.element)
            zero = ir.DenseElementsAttr.get_splat(nothing, ir.FloatAttr.get(self.element, 0.0))
            vector.store(arith.constant(nothing, zero), packed, [index(self.padded), index(v * _TOKENS)])
        with loop(tile.operands.low, tile.operands.high, index(1)) as strips:
            strip = strips.induction_variable
            self._multiply(tile, packed, gathered, sums, strip)
            self._finish(tile, sums, arith.muli(strip, index(self.height)))

    def _multiply(self, tile: TokenTile, packed: ir.Value, gathered: ir.Value, sums: ir.Value, strip: ir.Value) -> None:
        """The sums of a strip, [height, tokens]."""
        factor, total = (ir.Type.parse(f"!x86.amx.tile<16x{columns}>") for columns in (f"{_COLUMNS}xbf16", f"{_TOKENS}xf32"))
        operands, size = tile.operands, _ROWS * _COLUMNS
        begin = load_index(operands.positions, strip)
        end = load_index(operands.positions, arith.addi(strip, index(1)))
        nothing = [x86.TileZeroOp(total).result for _ in range(self.halves * tile.vectors)]
        with loop(begin, end, index(1), nothing) as panels:
            panel = panels.induction_variable
            first = arith.muli(panel, index(_COLUMNS))
            with loop(index(0), index(_COLUMNS // 2), index(1)) as pairs:
                pair = pairs.induction_variable
                at = arith.addi(first, arith.muli(pair, index(2)))
                columns = [load_index(operands.coordinates, arith.addi(at, index(i))) for i in (0, 1)]
                for v, line in enumerate(pairs_of(packed, tile.vectors, *columns)):
                    vector.store(line, gathered, [index(v), pair, index(0)])
            x = [x86.TileLoadOp(factor, gathered, [index(v), index(0), index(0)]).result for v in range(tile.vectors)]
            start, before = arith.muli(panel, index(self.halves * size)), iter(panels.inner_iter_args)
            found = []
            for half in range(self.halves):
                place = arith.addi(start, index(half * size))
                weight = x86.TileLoadOp(factor, operands.values, [place], stride=index(_COLUMNS)).result
                found += [x86.TileMulFOp(weight, tokens, next(before)).result for tokens in x]
            scf.YieldOp(found)
        for i, result in enumerate(panels.results):
            half, v = divmod(i, tile.vectors)
            x86.TileStoreOp(sums, [index(half * _ROWS), index(v * _TOKENS)], result)

    def _finish(self, tile: TokenTile, sums: ir.Value, row: ir.Value) -> None:
        """The sums of a strip through the epilogue into y."""
        if not self.epilogue.trivial:
            with loop(index(0), index(self.height), index(1)) as rows:
                slot = rows.induction_variable
                m = arith.minui(arith.addi(row, slot), index(self.M - 1))
                places = [[slot, tile.at(v)] for v in range(tile.vectors)]
                totals = tile.before([vector.load(tile.vec, sums, place) for place in places], m)
                for place, result in zip(places, totals, strict=True):
                    vector.store(result, sums, place)
        for half in range(self.halves):
            offset = index(half * _ROWS)
            tile.unpack(sums, offset, arith.addi(row, offset))
