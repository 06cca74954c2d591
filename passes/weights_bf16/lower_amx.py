"""lower-amx: lowers a `kernel.spmm` of the schedule "amx" to products of blocks of bf16 by AMX tiles.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "amx", tile = [32, 128]} : ... tensor<3072x768xbf16, "vnni(...)">
after    scf.parallel (%task) = ...                     // tiles of 32 or 128 tokens x chunks of the strips of the weight
           func.call @region_tile32(...)                // or _tile16, _copied16 if there are fewer tokens
         func.func private @region_tile32(...)          // see strips.py
           for each block of the strip:                 iter_args(2 x 2 tiles of sums)
             x86.amx.tile_mulf(16 tokens x 32 columns of x, 32 columns x 16 rows of the block, sums)
           x86.amx.tile_store the sums, from where they go through the epilogue

Tokens are the rows of the left tiles, so x is loaded unpacked, and y is stored without a transpose. The blocks of the weight
are the right tiles, stored in the order that the instruction needs.

Fastest for large blocks: 1.46 times as fast as "amxcolumns" at "768x3072 32x32 90% 128 tokens bf16" in
benchmarks/results/intel-xeon-graniterapids/prediction-bf16.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, scf, x86

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, Vnni
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.product import Operands, products
from gossamer.passes.loops.vectors import index, load_index, loop, reserve_workspace
from gossamer.passes.weights_bf16.strips import LANES, Group, Strips, storage_in_blocks, tile_of

_FEATURE = "amx"
_SPARSE, _DENSE = 32, 128  # tokens of a tile, if few or many blocks are stored
_ROWS = 16  # rows of an AMX tile
_COLUMNS = 32  # columns of the left AMX tile
_PRODUCTS, _BYTES = 180.0, 19.0  # products in a cycle, bytes loaded in a cycle
_RESULTS, _COPY = 6.0, 2.0  # cycles for a vector


def _storage(matrix: Matrix) -> Vnni | None:
    """Returns blocks of 32 columns, or None."""
    return storage_in_blocks(matrix, _FEATURE, lambda columns: _COLUMNS if columns % _COLUMNS == 0 else None)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tokens of a tile for few stored blocks and for many. Their sums fill at least all AMX tiles."""
    least = 64 if isinstance(stored, Vnni) and stored.rows == LANES else _SPARSE
    return tile_of(matrix, stored, _FEATURE, (least, _DENSE))


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles for S stored elements and T' tokens in whole tiles, the sum of

    - S T' / 180 for the products, or 2 S / 19 to read the elements if that is more,
    - 6 T' M / 16 for the results,
    - 2 T' K / 32 to copy x if there are fewer tokens than in a tile.
    """
    stored, computed = matrix.nonzeros / matrix.fill, -(-tokens // _ROWS) * _ROWS
    copy = _COPY * computed * matrix.columns / _COLUMNS if tokens < _ROWS else 0.0
    return max(stored * computed / _PRODUCTS, stored * 2 / _BYTES) + _RESULTS * computed * matrix.rows / LANES + copy


AMX = Family("amx", _storage, _tile, _cycles)


@dataclass(frozen=True)
class LowerAmx:
    """Lower products of blocks to AMX tiles."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, AMX.name):
            _lower(module, op)


def _lower(module: ir.Module, op: Any) -> None:
    strips = Strips(op)
    widths = (64, 32, 16) if strips.halves == 1 else (32, 16)
    with op.location:
        strips.run_tiles(widths, _ROWS, partial(_multiply, strips))
    reserve_workspace(module, strips.workspace)


def _multiply(strips: Strips, tokens: int, operands: Operands, group: Group) -> None:
    """Computes y for a group of tokens and a strip. Sums are tiles of 16 tokens x 16 rows, those of a token side by side."""
    factor, total = (ir.Type.parse(f"!x86.amx.tile<16x{columns}>") for columns in (f"{_COLUMNS}xbf16", f"{LANES}xf32"))
    left, right = [index(t) for t in range(0, tokens, _ROWS)], [index(h * LANES) for h in range(strips.halves)]
    size = LANES * _COLUMNS
    with loop(group.begin, group.end, index(1), [x86.TileZeroOp(total).result for _ in left for _ in right]) as blocks:
        block = blocks.induction_variable
        k = arith.muli(load_index(operands.coordinates, block), index(_COLUMNS))
        first = arith.muli(block, index(strips.halves * size))
        w = [
            x86.TileLoadOp(factor, operands.values, [arith.addi(first, index(h * size))], stride=index(_COLUMNS)).result
            for h in range(strips.halves)
        ]
        before, sums = iter(blocks.inner_iter_args), []
        for t in left:  # one by one, because AMX has only eight tiles
            x = x86.TileLoadOp(factor, group.x, [arith.addi(group.row, t), k]).result
            sums += [x86.TileMulFOp(x, part, next(before)).result for part in w]
        scf.YieldOp(sums)
    found = strips.sums(operands, tokens)
    places = [[t, h] for t in left for h in right]
    for place, tile in zip(places, blocks.results, strict=True):
        x86.TileStoreOp(found, place, tile)
    strips.store(operands, group, found)
