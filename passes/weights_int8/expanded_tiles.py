"""The product of 32 rows of a weight in a map of tiles (`TileMap`) with many tokens, on AMX. The rows are expanded once.

for each tile of the rows:  vpexpandw(values[place..], a mask) into memory                    // vpexpandb of int8
for each 32 tokens, for each tile of the rows:  iter_args(2 x 2 tiles of sums)
  x86.amx.tile_mulf(16 rows x 32 columns, 32 columns x 16 tokens, sums)                       // tile_muli of 64 columns
  a part of the caller's work: AMX needs 16 cycles for an instruction, in which vector units are free

Each tile of x is loaded once for two tiles of the weight. Else the second-level cache would bound the product.

Bytes of x are packed with 128 added (quad_lines.py). So the sums begin with -128 times the weights of each row.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.dialects.packing import TileMap
from gossamer.passes.loops.buffers import WeightArrays
from gossamer.passes.loops.vectors import index, load_index, loop
from gossamer.passes.weights_bf16.amx_panel_loop import LINES, ROWS, TOKENS
from gossamer.passes.weights_bf16.lower_expand import expanded_line
from gossamer.passes.weights_int8.byte_products import splat_of_bytes

HALVES = 2
"""Tiles of 16 rows that share the loads of x."""

PARTS = 16
"""Number of parts of the caller's work in one multiplication."""

_STEPS = 3  # steps of AMX between which these parts are distributed


def expanded_bytes(columns: int, storage: TileMap) -> int:
    """Returns the bytes of 32 expanded rows with `columns` columns."""
    return HALVES * -(-columns // storage.columns) * ROWS * LINES * 4


@dataclass(frozen=True)
class ExpandedTiles(WeightArrays):
    """The loops for a weight with `groups` groups of 16 rows, with `tiles` tiles each. They are an `Expands`.

    lines   memory of the expanded rows, tile by tile
    middle  for bytes: a tile of -128; None for floats
    excess  for bytes: memory of two tiles of sums
    """

    weight: tuple[ir.Value, ...]
    groups: int
    tiles: int
    lines: ir.Value
    total: ir.Type
    middle: ir.Value | None
    excess: ir.Value | None

    def expand(self, group: ir.Value) -> None:
        """Expands 32 rows into memory. If the number of groups of 16 rows is odd, the last group is repeated."""
        for half in range(HALVES):
            rows = arith.addi(arith.muli(group, index(HALVES)), index(half))
            rows = rows if self.groups % HALVES == 0 else arith.minui(rows, index(self.groups - 1))
            masks, start = arith.muli(rows, index(self.tiles * ROWS)), index(half * self.tiles * ROWS)
            with loop(index(0), index(self.tiles * ROWS), index(ROWS), [load_index(self.positions, rows)]) as tiles:
                (place,), tile = tiles.inner_iter_args, tiles.induction_variable
                for row in range(ROWS):
                    line = arith.addi(tile, index(row))
                    expanded, place = expanded_line(self.weight, arith.addi(masks, line), place)
                    vector.store(expanded, self.lines, [arith.addi(start, line), index(0)])
                scf.YieldOp([place])
            if self.excess is not None:
                self._sum_excess(half, self.excess)

    def multiply(
        self, packed: ir.Value, token: ir.Value, sums: ir.Value, slot: ir.Value, meanwhile: Callable[[ir.Value], None]
    ) -> None:
        """Stores the products with x, `packed`, from `token` on, into sums[slot], [32 rows, tokens].

        Calls `meanwhile` with the number of each part, in order.
        """
        *_, width = ir.MemRefType(sums.type).shape
        vectors = width // TOKENS
        start = [self._start(half) for half in range(HALVES) for _ in range(vectors)]
        turns = next(n for n in (PARTS, PARTS // 2, PARTS // 4) if self.tiles // n >= _STEPS or n == PARTS // 4)
        each, parts = self.tiles // turns, PARTS // turns
        steps = min(each, _STEPS)
        with loop(index(0), index(turns), index(1), start) as loops:
            turn, totals = loops.induction_variable, list(loops.inner_iter_args)
            first, done = arith.muli(turn, index(each)), 0
            for number in range(steps):
                x = self._x(arith.addi(first, index(number)), packed, token, vectors)
                for half in range(HALVES):
                    totals = self._times(half, arith.addi(first, index(number)), x, totals)
                    due = (number * HALVES + half + 1) * parts // (steps * HALVES)
                    for part in range(done, due):
                        meanwhile(arith.addi(arith.muli(turn, index(parts)), index(part)))
                    done = due
            for part in range(done, parts):
                meanwhile(arith.addi(arith.muli(turn, index(parts)), index(part)))
            scf.YieldOp(self._steps(arith.addi(first, index(steps)), arith.addi(first, index(each)), packed, token, totals))
        totals = self._steps(index(turns * each), index(self.tiles), packed, token, list(loops.results))
        for number, total in enumerate(totals):
            half, v = divmod(number, vectors)
            x86.TileStoreOp(sums, [slot, index(half * ROWS), index(v * TOKENS)], total)

    def _steps(
        self, low: ir.Value, high: ir.Value, packed: ir.Value, token: ir.Value, totals: list[ir.Value]
    ) -> list[ir.Value]:
        """Returns the sums plus the tiles [low, high) times their columns of x."""
        with loop(low, high, index(1), totals) as steps:
            tile, found = steps.induction_variable, list(steps.inner_iter_args)
            x = self._x(tile, packed, token, len(totals) // HALVES)
            for half in range(HALVES):
                found = self._times(half, tile, x, found)
            scf.YieldOp(found)
        return list(steps.results)

    def _x(self, tile: ir.Value, packed: ir.Value, token: ir.Value, vectors: int) -> list[ir.Value]:
        """Loads the columns of x for the tiles with one number."""
        line = ir.MemRefType(self.lines.type).shape[1] // LINES
        k, first = arith.muli(tile, index(LINES)), arith.muli(token, index(line))
        places = [[k, arith.addi(first, index(v * TOKENS * line))] for v in range(vectors)]
        return [x86.TileLoadOp(self._factor, packed, place).result for place in places]

    def _times(self, half: int, tile: ir.Value, x: list[ir.Value], totals: list[ir.Value]) -> list[ir.Value]:
        """Returns the sums plus a tile of one half of the rows times x."""
        weight, found = self._weight(half, tile), list(totals)
        for v, tokens in enumerate(x):
            at = half * len(x) + v
            if self.middle is None:
                found[at] = x86.TileMulFOp(weight, tokens, totals[at]).result
            else:
                found[at] = x86.TileMulIOp(weight, tokens, totals[at], isZextRhs=True).result
        return found

    @property
    def _factor(self) -> ir.Type:
        type_ = ir.MemRefType(self.lines.type)
        return ir.Type.parse(f"!x86.amx.tile<{ROWS}x{type_.shape[1]}x{type_.element_type}>")

    def _weight(self, half: int, tile: ir.Value) -> ir.Value:
        row = arith.addi(arith.muli(tile, index(ROWS)), index(half * self.tiles * ROWS))
        return x86.TileLoadOp(self._factor, self.lines, [row, index(0)]).result

    def _start(self, half: int) -> ir.Value:
        if self.excess is None:
            return x86.TileZeroOp(self.total).result
        return x86.TileLoadOp(self.total, self.excess, [index(half), index(0), index(0)]).result

    def _sum_excess(self, half: int, excess: ir.Value) -> None:
        with loop(index(0), index(self.tiles), index(1), [x86.TileZeroOp(self.total).result]) as tiles:
            middle = x86.TileLoadOp(self._factor, self.middle, [index(0), index(0)]).result
            weight = self._weight(half, tiles.induction_variable)
            scf.YieldOp([x86.TileMulIOp(weight, middle, tiles.inner_iter_args[0]).result])
        x86.TileStoreOp(excess, [index(half), index(0), index(0)], tiles.results[0])


def expanded_tiles(
    weight: tuple[ir.Value, ...], memory: ir.Value, sums: ir.Type, storage: TileMap, rows: int, columns: int
) -> ExpandedTiles:
    """Returns the loops for a weight of `rows` x `columns`, whose sums have the type `sums`. Call it in the first block of a
    function: it allocates. `memory` has `expanded_bytes` bytes."""
    element, tiles = ir.MemRefType(weight[-1].type).element_type, -(-columns // storage.columns)
    lines = memref.view(ir.MemRefType.get([HALVES * tiles * ROWS, storage.columns], element), memory, index(0), [])
    total = ir.Type.parse(f"!x86.amx.tile<{ROWS}x{TOKENS}x{sums}>")
    middle = excess = None
    if isinstance(element, ir.IntegerType):
        middle = memref.alloca(ir.MemRefType.get([ROWS, storage.columns], element), [], [], alignment=64)
        excess = memref.alloca(ir.MemRefType.get([HALVES, ROWS, TOKENS], sums), [], [], alignment=64)
        for row in range(ROWS):
            vector.store(splat_of_bytes(storage.columns, -128), middle, [index(row), index(0)])
    return ExpandedTiles(weight, -(-rows // ROWS), tiles, lines, total, middle, excess)
