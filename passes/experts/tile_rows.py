"""Products of many slots of an expert by tiles of bf16, with the rows of its weight in place.

func.private @region_turn(...)          // columns of the rows of x of up to 96 slots, transposed into scratch memory
func.private @region_rows32x32(...)     // 32 rows and 32 slots; or 16 of either
  scf.for each 32 columns iter_args(2 x 2 tiles of sums)
    x86.amx.tile_mulf(16 rows x 32 columns, 32 columns x 16 slots, sums); prefetch lines of the next rows
  add the tiles, transposed, to scratch memory

The weight is not packed: it is the left operand, and the lines of x have pairs of columns. So this is for weights of bf16 whose
rows and columns fill tiles. tile_slots.py is for other weights.
"""

from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector, x86

from gossamer.passes.experts.slot_tile import SlotTile
from gossamer.passes.loops.vectors import index, loop, transpose

HEIGHTS, WIDTHS = (32, 16), (32, 16)
"""Numbers of rows and of slots for which there are functions, the most first."""
DEPTH = 1024
"""Columns of x that are transposed at once."""
ROWS = 256
"""Rows of a block, for which x is transposed once."""
_TILE = 16


def bytes_of(slots: int) -> int:
    """Returns the bytes of scratch memory: x of `slots` slots, then tiles of sums."""
    return 2 * DEPTH * slots + 4 * max(HEIGHTS) * max(WIDTHS)


class TurnSlots(SlotTile):
    """Transposes the columns [low, low + depth) of the slots of a block from `local` on, 16 at a time."""

    def __init__(self, product: Any, *given: ir.Value) -> None:
        *others, self.slots_left, self.low, self.depth = given
        super().__init__(product, 0, *others)
        self.turned = _turned(product, others[4], others[5], ir.F32Type.get())

    def emit(self) -> None:
        """Emits the body of a function."""
        with loop(index(0), self.slots_left, index(_TILE)) as groups:
            first = groups.induction_variable
            tokens = [self.token(arith.addi(first, index(t))) for t in range(_TILE)]
            with loop(index(0), self.depth, index(2 * _TILE)) as columns:
                column = columns.induction_variable
                read = [self.stored.x(self.x, token, arith.addi(self.low, column), None)[0] for token in tokens]
                line = arith.shrui(column, index(1))
                for n, value in enumerate(transpose([self.stored.word(each) for each in read])):
                    vector.store(value, self.turned, [arith.addi(line, index(n)), first])


class TileRows(SlotTile):
    """Emits the products of `height` rows of a weight with up to `width` slots of a block from `local` on.

    row        the row of the weight's memory; `begin` is its column
    at         the row in its block
    depth      number of columns
    following  the next row of memory. Each step prefetches the lines [low, high) of its share of the next tiles.
    """

    def __init__(self, product: Any, height: int, width: int, *given: ir.Value) -> None:
        *others, self.row, self.begin, self.at, self.depth, self.following, self.low, self.high = given
        super().__init__(product, 0, *others)
        self.height, self.width = height, width
        workspace, base, offset = others[4:7]
        self.turned = _turned(product, workspace, base, ir.BF16Type.get())
        place = arith.addi(base, index(product.before_tiles + 2 * DEPTH * product.slots))
        self.squares = memref.view(ir.MemRefType.get([max(HEIGHTS), max(WIDTHS)], ir.F32Type.get()), workspace, place, [])
        self.sums = product.sums_of_many(workspace, offset)

    def emit(self) -> None:
        """Emits the body of a function."""
        factor, total = (ir.Type.parse(f"!x86.amx.tile<16x{kind}>") for kind in ("32xbf16", "16xf32"))
        rows, slots = range(0, self.height, _TILE), range(0, self.width, _TILE)
        self._choose_order()
        nothing = [x86.TileZeroOp(total).result for _ in rows for _ in slots]
        with loop(index(0), self.depth, index(2 * _TILE), nothing) as steps:
            column, sums = steps.induction_variable, iter(steps.inner_iter_args)
            place = arith.addi(self.begin, column)
            with loop(self.low, self.high, index(1)) as lines:
                self.weight.fetch_at(self._following(column, lines.induction_variable))
            line = arith.shrui(column, index(1))
            xs = [x86.TileLoadOp(factor, self.turned, [line, self._words(slot)]).result for slot in slots]
            found = []
            for row in rows:
                weight = self.weight.tile(factor, arith.addi(self.row, index(row)), place)
                found += [x86.TileMulFOp(weight, x, next(sums)).result for x in xs]
            scf.YieldOp(found)
        squares = [(row, slot) for row in rows for slot in slots]
        for (row, slot), tile in zip(squares, steps.results, strict=True):
            x86.TileStoreOp(self.squares, [index(row), index(slot)], tile)
        for row, slot in squares:
            self._add(row, slot)

    def _choose_order(self) -> None:
        """Chooses the order in which to prefetch the next rows: that of memory, or, if x has more columns than `depth`, row by
        row at the columns of a step."""
        whole = arith.cmpi(arith.CmpIPredicate.eq, self.depth, self.columns)
        self.first = self.weight.place(self.following, self.begin)
        self.of_column = arith.select(whole, index(max(HEIGHTS)), index(1))
        self.of_line = arith.select(whole, index(2 * _TILE), self.weight.stride)

    def _following(self, column: ir.Value, line: ir.Value) -> ir.Value:
        step = arith.addi(arith.muli(column, self.of_column), arith.muli(line, self.of_line))
        return arith.addi(self.first, step)

    def _words(self, slot: int) -> ir.Value:
        """Returns the place where the pairs of a slot begin in a line."""
        return arith.muli(arith.addi(self.local, index(slot)), index(2))

    def _add(self, row: int, slot: int) -> None:
        """Adds a transposed tile to the sums."""
        read = [vector.load(self.stored.vec, self.squares, [index(row + r), index(slot)]) for r in range(_TILE)]
        first, at = arith.addi(self.local, index(slot)), arith.addi(self.at, index(row))
        for t, value in enumerate(transpose(read)):
            place = [arith.addi(first, index(t)), at]
            vector.store(arith.addf(value, vector.load(self.stored.vec, self.sums, place)), self.sums, place)


def _turned(product: Any, workspace: ir.Value, base: ir.Value, element: ir.Type) -> ir.Value:
    """Returns the memory of transposed x, as pairs of bf16 or as words: [columns / 2][slots]."""
    shape = [DEPTH // 2, product.slots if isinstance(element, ir.F32Type) else 2 * product.slots]
    return memref.view(ir.MemRefType.get(shape, element), workspace, arith.addi(base, index(product.before_tiles)), [])
