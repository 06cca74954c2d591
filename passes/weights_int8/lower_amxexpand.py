"""lower-amxexpand: lowers a `kernel.spmm` of the schedule "amxexpand", which loads as sparse and multiplies by AMX as dense.

before   %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "amxexpand", tile = [32, 32]}
             : (..., tensor<3072x768xbf16, "vnnimap(reduction=1, rows=32)">) -> ...
after    scf.parallel (%task) = ...                     // chunks of the strips of the weight
           func.call @region_tile32(...)                // or _tile16, _copied16 if there are fewer tokens
         func.func private @region_tile32(...)          // see strips.py
           for each 32 columns:  iter_args(the place among the values, 2 x 2 tiles of sums)
             vpexpandw(values[place..], a mask) into the workspace      // 16 lines, see lower_expand.py; for 16 rows each
             x86.amx.tile_mulf(16 tokens x 32 columns of x, 32 columns x 16 rows from the workspace, sums)
           x86.amx.tile_store the sums, from where they go through the epilogue

Up to some tens of tokens, the memory reads of the weight bound a dense product. This schedule reads fewer bytes.

Weights of bytes, and all weights of chains, are maps of tiles (amx_map_loop.py), which are multiplied with a packed tile of x.

Fastest for unstructured zeros on AMX: 2.8 times as fast as "broadcast" at "768x3072 80% 32 tokens bf16" in
benchmarks/results/intel-xeon-graniterapids/prediction-bf16.json.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing, TileMap, VnniMap
from gossamer.passes.framework.chain_product import ChainProduct, Expansion, Layout, Stores
from gossamer.passes.framework.family import Family, Matrix
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.product import Operands, products, shape_of, stored_of
from gossamer.passes.loops.vectors import index, loop, reserve_workspace
from gossamer.passes.weights_bf16.amx_panel_loop import TOKENS
from gossamer.passes.weights_bf16.lower_expand import expanded_line
from gossamer.passes.weights_bf16.strips import LANES, Group, Strips
from gossamer.passes.weights_int8.amx_map_loop import tile_maps
from gossamer.passes.weights_int8.expanded_tiles import HALVES, PARTS, expanded_bytes, expanded_tiles
from gossamer.passes.weights_int8.lower_amxquads import TiledBytes

_FEATURES = {"bf16": frozenset({"amx", "avx512vbmi2"}), "i8": frozenset({"amxint8", "avx512vbmi2"})}
_WIDTHS = (32, 16)  # tokens whose sums are in tiles
_ROWS, _COLUMNS = 16, 32  # rows and columns of an AMX tile
_IN_CHAINS = 4  # vectors of tokens in a tile of a chain
_EXPANDED, _PRODUCTS, _BYTES, _RESULTS = 3.0, 180.0, 19.0, 6.0
_EXPANDED_ROW, _TILE, _ELEMENT, _STORED = 6.2, 16.0, 0.45, 3.0


def _storage(matrix: Matrix) -> VnniMap | TileMap | None:
    able = matrix.element in _FEATURES and _FEATURES[matrix.element] <= matrix.features
    if not able or not matrix.columns:  # the loops need at least one tile
        return None
    return VnniMap(matrix.reduction, 32) if matrix.element == "bf16" else _in_chains(matrix)


def _in_chains(matrix: Matrix) -> TileMap:
    return TileMap(matrix.reduction, 32 if matrix.element == "bf16" else 64)


def _tile(matrix: Matrix, stored: Format | Packing) -> tuple[int, ...] | None:
    """Returns the tile: [tokens], or [tokens, tokens] if x is not packed."""
    if _storage(matrix) is None or stored not in (_storage(matrix), _in_chains(matrix)):
        return None
    return (_WIDTHS[0],) * 2 if isinstance(stored, VnniMap) else (_IN_CHAINS * TOKENS,)


def _cycles(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles for T' tokens in whole tiles.

    bf16: for every 32 tokens, 3 for each line of 32 elements, zeros included, or the time to read M K / 8 + 2 nnz bytes at 19
    per cycle if that is more; M K T' / 180 for the products; 6 T' M / 16 for the results. int8: the cycles of chains, and
    0.45 (K + M) T' to transpose x and y.
    """
    elements, computed = matrix.rows * matrix.columns, -(-tokens // _ROWS) * _ROWS
    if matrix.element == "i8":
        return _multiplying(matrix, tokens) + _ELEMENT * (matrix.columns + matrix.rows) * computed
    groups = -(-tokens // _WIDTHS[0])
    expanded = groups * max(_EXPANDED * elements / _COLUMNS, (elements / 8 + 2 * matrix.nonzeros) / _BYTES)
    return expanded + elements * computed / _PRODUCTS + _RESULTS * computed * matrix.rows / LANES


def _multiplying(matrix: Matrix, tokens: int) -> float:
    """Returns the cycles in a chain: for every 64 tokens 6.2 for each row of a tile, and 16 for each product of tiles.

    Bytes have one more product for every 64 tokens.
    """
    tiles = matrix.rows * matrix.columns / (_ROWS * _in_chains(matrix).columns)
    groups = -(-tokens // (_IN_CHAINS * TOKENS))
    products = -(-tokens // TOKENS) + (groups if matrix.element == "i8" else 0)
    return tiles * (groups * _ROWS * _EXPANDED_ROW + products * _TILE)


def _in_chain(op: Any) -> ChainProduct:
    (rows, columns), stored = shape_of(op), stored_of(op, TileMap)
    loops = partial(expanded_tiles, storage=stored, rows=rows, columns=columns)
    layout: Layout | None = "lines" if stored.columns == _COLUMNS else None
    few, height = partial(tile_maps, storage=stored, columns=columns), HALVES * _ROWS
    inner = Expansion(expanded_bytes(columns, stored), PARTS, loops, few, _ROWS)
    return ChainProduct(_IN_CHAINS * TOKENS, height, -(-rows // height), 1, layout, inner, stores=True)


def _gain_in_chains(matrix: Matrix, tokens: int) -> float:
    """A chain transposes nothing: its cycles are those of the products, and 3 for each vector of results."""
    stored = -(-tokens // TOKENS) * _STORED * matrix.rows
    return _cycles(matrix, tokens) / (_multiplying(matrix, tokens) + stored)


AMXEXPAND = Family(
    "amxexpand",
    _storage,
    _tile,
    _cycles,
    chain=_in_chain,
    chained=_in_chains,
    gain=_gain_in_chains,
    integers=True,
)


@dataclass(frozen=True)
class LowerAmxexpand:
    """Lower products whose weights are expanded to tiles."""

    def run(self, module: ir.Module) -> None:
        for op in products(module, AMXEXPAND.name):
            if isinstance(storage_of_type(ir.RankedTensorType(op.w.type)), TileMap):
                _Bytes(op).lower(module)
            else:
                _lower(module, op)


class _Bytes(TiledBytes[TileMap]):
    storage_kind = TileMap

    def inner(self, weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int) -> Stores:
        return tile_maps(weight, packed, vec, vectors, self.stored, self.K)


def _lower(module: ir.Module, op: Any) -> None:
    strips = Strips(op, _COLUMNS)
    with op.location:
        strips.run_tiles(_WIDTHS, _ROWS, partial(_multiply, strips))
    reserve_workspace(module, strips.workspace)


def _multiply(strips: Strips, tokens: int, operands: Operands, group: Group) -> None:
    """Computes y for a group of tokens and a strip. Before the sums are stored, their memory has lines of the weight."""
    factor, total = (ir.Type.parse(f"!x86.amx.tile<16x{columns}>") for columns in (f"{_COLUMNS}xbf16", f"{LANES}xf32"))
    left, right = [index(t) for t in range(0, tokens, _ROWS)], [index(h * LANES) for h in range(strips.halves)]
    lines_type = ir.MemRefType.get([strips.halves, _COLUMNS // 2, 2 * LANES], strips.element)
    lines = memref.view(lines_type, operands.workspace, operands.offset, [])
    panels = strips.padded_K // _COLUMNS
    start = arith.muli(arith.divui(group.first_row, index(strips.height)), index(panels * _COLUMNS // 2 * strips.halves))
    nothing = [x86.TileZeroOp(total).result for _ in left for _ in right]
    with loop(index(0), index(panels), index(1), [group.begin, *nothing]) as blocks:
        place, *before = blocks.inner_iter_args
        first = arith.addi(start, arith.muli(blocks.induction_variable, index(_COLUMNS // 2 * strips.halves)))
        with loop(index(0), index(_COLUMNS // 2), index(1), [place]) as pairs:
            (at,), pair = pairs.inner_iter_args, pairs.induction_variable
            for half in range(strips.halves):
                line = arith.addi(first, arith.addi(arith.muli(pair, index(strips.halves)), index(half)))
                expanded, at = expanded_line(operands.weight, line, at)
                vector.store(expanded, lines, [index(half), pair, index(0)])
            scf.YieldOp([at])
        weights = [x86.TileLoadOp(factor, lines, [index(h), index(0), index(0)]).result for h in range(strips.halves)]
        totals, k = iter(before), arith.muli(blocks.induction_variable, index(_COLUMNS))
        sums = []
        for t in left:
            x = x86.TileLoadOp(factor, group.x, [arith.addi(group.row, t), k]).result
            sums += [x86.TileMulFOp(x, weight, next(totals)).result for weight in weights]
        scf.YieldOp([pairs.results[0], *sums])
    found = strips.sums(operands, tokens)
    places = [[t, h] for t in left for h in right]
    for where, tile in zip(places, list(blocks.results)[1:], strict=True):
        x86.TileStoreOp(found, where, tile)
    strips.store(operands, group, found)
