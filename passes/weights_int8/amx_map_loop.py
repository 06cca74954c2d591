"""The product of 16 rows of a weight in a map of tiles (`TileMap`) with a tile of tokens, on AMX. The weight is on the left.

for each tile of the rows:  iter_args(the place among the values, a tile of sums for each 16 tokens)
  vpexpandw(values[place..], a mask) into memory                      // 16 lines; vpexpandb for int8
  x86.amx.tile_mulf(16 rows x 32 columns, 32 columns x 16 tokens, sums)       // tile_muli of 64 columns
x86.amx.tile_store the sums

Bytes of x are packed with 128 added (quad_lines.py). So one more tile sums -128 times the weights of each row. In the end it is
added to all sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.dialects.packing import TileMap
from gossamer.passes.loops.inner_loop import InnerLoop
from gossamer.passes.loops.vectors import index, load_index, loop
from gossamer.passes.weights_bf16.amx_panel_loop import LINES, ROWS, TOKENS
from gossamer.passes.weights_bf16.lower_expand import expanded_line
from gossamer.passes.weights_int8.byte_products import splat_of_bytes


@dataclass(frozen=True)
class TileMaps(InnerLoop):
    """Inner loops for groups of 16 rows of `tiles` tiles. x is packed as lines of pairs (bf16_pairs.py), or of quads.

    lines   memory of two expanded tiles, which are filled in turn
    middle  for bytes: a tile of -128; None for floats
    excess  for bytes: memory of a tile of sums
    """

    tiles: int
    lines: ir.Value
    middle: ir.Value | None
    excess: ir.Value | None

    @property
    def at_once(self) -> int:
        """All vectors of a tile of tokens."""
        return self.vectors

    def row(self, group: ir.Value, slot: ir.Value) -> ir.Value:
        """Returns the row of a slot. The rows of a group are neighbours."""
        return arith.addi(arith.muli(group, index(ROWS)), slot)

    def store(self, group: ir.Value, sums: ir.Value, token: ir.Value) -> None:
        """Stores the products of a group into `sums`, [rows, tokens]."""
        total = ir.Type.parse(f"!x86.amx.tile<{ROWS}x{TOKENS}x{ir.MemRefType(sums.type).element_type}>")
        first = arith.muli(group, index(self.tiles * ROWS))
        nothing = [x86.TileZeroOp(total).result for _ in range(self.vectors + (self.middle is not None))]
        place = self._expand(first, index(0), load_index(self.positions, group))
        with loop(index(1), index(self.tiles), index(1), [place, *nothing]) as tiles:
            tile, (place, *before) = tiles.induction_variable, tiles.inner_iter_args
            place = self._expand(first, tile, place)
            scf.YieldOp([place, *self._multiply(arith.subi(tile, index(1)), before)])
        found = self._multiply(index(self.tiles - 1), list(tiles.results)[1:])
        for v, each in enumerate(found[: self.vectors]):
            x86.TileStoreOp(sums, [index(0), index(v * TOKENS)], each)
        if self.excess is not None:
            x86.TileStoreOp(self.excess, [index(0), index(0)], found[-1])
            self._take_away(self.excess, sums)

    def _expand(self, first: ir.Value, tile: ir.Value, place: ir.Value) -> ir.Value:
        """Expands a tile into memory, by masks that begin at `first`. Returns the place after its values.

        The tile is loaded one step later, because rows that have just been stored cannot be loaded as a tile without a wait.
        """
        masks, slot = arith.addi(first, arith.muli(tile, index(ROWS))), arith.remui(tile, index(2))
        for row in range(ROWS):
            expanded, place = expanded_line(self.weight, arith.addi(masks, index(row)), place)
            vector.store(expanded, self.lines, [slot, index(row), index(0)])
        return place

    def _multiply(self, tile: ir.Value, sums: Sequence[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus an expanded tile times its columns of x."""
        (_, _, columns), element = ir.MemRefType(self.lines.type).shape, ir.MemRefType(self.lines.type).element_type
        factor = ir.Type.parse(f"!x86.amx.tile<{ROWS}x{columns}x{element}>")
        line, k = columns // LINES * TOKENS, arith.muli(tile, index(LINES))
        weight = x86.TileLoadOp(factor, self.lines, [arith.remui(tile, index(2)), index(0), index(0)]).result
        found = []
        for v in range(self.vectors):
            x = x86.TileLoadOp(factor, self.packed, [k, index(v * line)]).result
            if self.middle is None:
                found.append(x86.TileMulFOp(weight, x, sums[v]).result)
            else:
                found.append(x86.TileMulIOp(weight, x, sums[v], isZextRhs=True).result)
        if self.middle is not None:
            middle = x86.TileLoadOp(factor, self.middle, [index(0), index(0)]).result
            found.append(x86.TileMulIOp(weight, middle, sums[-1]).result)
        return found

    def _take_away(self, excess: ir.Value, sums: ir.Value) -> None:
        with loop(index(0), index(ROWS), index(1)) as rows:
            row = rows.induction_variable
            less = vector.load(self.vec, excess, [row, index(0)])
            for v in range(self.vectors):
                at = [row, index(v * TOKENS)]
                vector.store(arith.addi(vector.load(self.vec, sums, at), less), sums, at)


def tile_maps(
    weight: tuple[ir.Value, ...], packed: ir.Value, vec: ir.VectorType, vectors: int, storage: TileMap, columns: int
) -> TileMaps:
    """Returns the inner loops for a weight with `columns` columns. Call it in the first block of a function: it allocates."""
    element = ir.MemRefType(weight[-1].type).element_type
    tile = ir.MemRefType.get([ROWS, storage.columns], element)
    middle = excess = None
    with ir.InsertionPoint.at_block_begin(ir.InsertionPoint.current.block):  # after a loop, LLVM would allocate it each time
        lines = memref.alloca(ir.MemRefType.get([2, ROWS, storage.columns], element), [], [], alignment=64)
        if isinstance(element, ir.IntegerType):
            middle = memref.alloca(tile, [], [], alignment=64)
            excess = memref.alloca(ir.MemRefType.get([ROWS, TOKENS], vec.element_type), [], [], alignment=64)
    if middle is not None:
        for row in range(ROWS):
            vector.store(splat_of_bytes(storage.columns, -128), middle, [index(row), index(0)])
    return TileMaps(weight, packed, vec, vectors, -(-columns // storage.columns), lines, middle, excess)
