"""Products of many slots of an expert with packed panels by AMX tiles of bf16. (many_slots.py has them by dot products.)

func.private @region_many32(...)     // or _many16
  copy the columns [low, low + depth) of 32 tokens' rows into scratch memory
  for each 32 of the panel's 64 rows:
    scf.for each 32 columns iter_args(2 x 2 tiles of sums)
      x86.amx.tile_mulf(16 slots x 32 columns, 32 columns x 16 rows, sums)
    store the tiles in scratch memory, from which they began; for integers, first multiply by the scales of their rows

The lines of a panel have pairs of columns, the layout of a right operand. The next panel is prefetched in two parts: one
while a panel is packed, the other while its first tiles are multiplied.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.passes.experts.many_slots import DEPTH, Following
from gossamer.passes.experts.slot_tile import SlotTile
from gossamer.passes.loops.vectors import index, loop

HEIGHTS = (32, 16)
"""Numbers of slots for which there are functions, the most first."""
BYTES = (2 * max(HEIGHTS) * 2 * DEPTH) + 4 * 32 * 32
"""Bytes of scratch memory: rows of x, then sums of integers."""
_TILE, _ACROSS = 16, 2  # rows and slots of a tile; tiles of rows at once


class TileSlots(SlotTile):
    """Emits the products of up to `height` slots of a block with a panel of columns [low, low + depth) of x.

    following  the next panel
    number     number of the tile of slots in its block
    """

    def __init__(self, product: Any, height: int, *given: ir.Value) -> None:
        *others, self.low, self.depth, row, begin, self.number, self.at = given
        super().__init__(product, 0, *others)
        self.height, self.width, self.following = height, product.width, Following(product, self.weight, row, begin)
        workspace, base = others[4:6]
        self.rows = memref.view(_memory(max(HEIGHTS), 2 * DEPTH, ir.BF16Type.get()), workspace, _after(base, product, 0), [])
        self.scratch = memref.view(
            _memory(max(HEIGHTS), _ACROSS * _TILE, ir.F32Type.get()),
            workspace,
            _after(base, product, 4 * max(HEIGHTS) * DEPTH),
            [],
        )
        self.sums = product.sums_of_many(workspace, others[6])
        self.pairs = memref.view(_memory(DEPTH, 2 * product.width, ir.BF16Type.get()), workspace, base, [])

    def emit(self) -> None:
        """Emits the body of a function."""
        self._gather()
        early = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, self.number, index(0)), has_else=True)
        for block, fetches in ((early.then_block, True), (early.else_block, False)):
            with ir.InsertionPoint(block):
                with loop(index(0), index(self.width), index(_ACROSS * _TILE)) as parts:
                    self._multiply(parts.induction_variable, fetches)
                scf.YieldOp([])

    def _gather(self) -> None:
        """Copies the columns of the slots' rows of x, with zeros after the last ones."""
        one = self.stored.columns
        whole = arith.subi(self.depth, arith.remui(self.depth, index(one)))
        with loop(index(0), index(self.height), index(1)) as slots:
            slot = slots.induction_variable
            token = self.token(slot)
            for low, high, masked in ((index(0), whole, False), (whole, self.depth, True)):
                with loop(low, high, index(one)) as columns:
                    column = columns.induction_variable
                    left = arith.subi(high, column) if masked else None
                    (value,) = self.stored.x(self.x, token, arith.addi(self.low, column), left)
                    vector.store(value, self.rows, [slot, column])

    def _multiply(self, row: ir.Value, fetches: bool) -> None:
        """Adds the products with 32 rows from `row` of the panel on to the sums."""
        factor, total = (ir.Type.parse(f"!x86.amx.tile<16x{kind}>") for kind in ("32xbf16", "16xf32"))
        slots = range(0, self.height, _TILE)
        rows = [arith.addi(row, index(n * _TILE)) for n in range(_ACROSS)]
        places = [
            ([arith.addi(self.local, index(t)), arith.addi(self.at, at)], [index(t), index(n * _TILE)])
            for t in slots
            for n, at in enumerate(rows)
        ]
        before = [
            x86.TileZeroOp(total).result if self.stored.scaled else x86.TileLoadOp(total, self.sums, place).result
            for place, _ in places
        ]
        steps = arith.ceildivui(self.depth, index(self.stored.columns))
        with loop(index(0), steps, index(1), before) as each:
            step, sums = each.induction_variable, iter(each.inner_iter_args)
            if fetches:
                done = arith.addi(arith.muli(arith.divui(row, index(_ACROSS * _TILE)), index(DEPTH // _TILE)), step)
                self.following.fetch(1, done, self.width // (_ACROSS * _TILE) * (DEPTH // _TILE))
            column, line = arith.muli(step, index(self.stored.columns)), arith.muli(step, index(_TILE))
            weights = [x86.TileLoadOp(factor, self.pairs, [line, arith.muli(at, index(2))]).result for at in rows]
            found = []
            for t in slots:
                x = x86.TileLoadOp(factor, self.rows, [index(t), column]).result
                found += [x86.TileMulFOp(x, weight, next(sums)).result for weight in weights]
            scf.YieldOp(found)
        for (place, inner), tile in zip(places, each.results, strict=True):
            if self.stored.scaled:
                x86.TileStoreOp(self.scratch, inner, tile)
            else:
                x86.TileStoreOp(self.sums, place, tile)
        if self.stored.scaled:
            self._add_scaled(rows)

    def _add_scaled(self, rows: list[ir.Value]) -> None:
        """Adds the tiles in the scratch memory, times the scales of their rows, to the sums."""
        scales = [vector.load(self.stored.vec, self.panel, [index(DEPTH), at]) for at in rows]
        with loop(index(0), index(self.height), index(1)) as slots:
            slot = slots.induction_variable
            for n, (at, scale) in enumerate(zip(rows, scales, strict=True)):
                place = [arith.addi(self.local, slot), arith.addi(self.at, at)]
                own = vector.load(self.stored.vec, self.scratch, [slot, index(n * _TILE)])
                vector.store(vector.fma(own, scale, vector.load(self.stored.vec, self.sums, place)), self.sums, place)


def _memory(rows: int, columns: int, element: ir.Type) -> ir.MemRefType:
    return ir.MemRefType.get([rows, columns], element)


def _after(base: ir.Value, product: Any, offset: int) -> ir.Value:
    """Returns a place behind the panel of a thread."""
    return arith.addi(base, index(product.before_tiles + offset))
