"""The frame of the lowerings for experts. It sums the products of an expert's slots with rows of its weight.

scf.parallel (%task) = ...                                   // equal shares of the rows; if rows are few, also of the slots
  for each expert, for each 96 of its slots, for each 64 rows of the thread's share:
    the bias into scratch memory [slot][row]
    at most 8 slots:  func.call @region_few8(...)            // or _few1, 2, 3, 4, 6: all of them, row by row (few_slots.py)
    vectors of 256 bits, 4 to 48 slots:  for each 512 columns, 64 rows, 8 slots: func.call @region_some8(...)  // some_slots.py
    more:             for each 128 columns: func.call @region_pack(...)
                        for each 6 slots: func.call @region_many6(...)           // many_slots.py
    with tiles, more than 4:  many32 in place of many6 (tile_slots.py); or for rows of bf16 that fill tiles, 256 of them:
                      func.call @region_turn(...); for each 32 rows and slots: func.call @region_rows32x32(...)  // tile_rows.py
    the lowering's own code, which reads the sums from the scratch memory

Weights are read in place, once for 96 slots. Those of experts without a slot are not read. Rows of x are read in place, too,
but for parts that stay in a cache: no row is padded. A `turned` weight is [experts, columns, rows] (few_turned.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.passes.experts import few_slots, few_turned, many_slots, panels, some_slots, tile_rows, tile_slots
from gossamer.passes.experts.product_functions import Functions, functions_of
from gossamer.passes.experts.stored_weights import Floats, stored_as
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import (
    call_narrowest,
    index,
    load_index,
    loop,
    mask_of,
    parallel,
    reserve_workspace,
    zeros,
)

SLOTS = 96
"""Most slots of an expert in a block: their rows of x stay in the second-level cache."""
UNIT = 16
"""Rows that one thread takes together."""
_APART = 16  # extra elements of a line of sums: at multiples of 1 KB, processors confuse the addresses of its places
_BESIDE_TILES = 4  # most slots for which dot products take no longer than reading the weight, so that tiles do not pay
_FEW_ROWS = {False: 64, True: 512}  # rows of a block of few slots, if the weight is turned or not: pieces of some KB


@dataclass(frozen=True)
class Block:
    """Some slots of an expert and some rows.

    expert       number of the expert
    slot, slots  the first slot in sorted order, and their number
    row, rows    the first row, and their number
    sums         memory of [slot][row] f32, one for each stream
    first        whether these are the thread's first rows of the slots
    """

    expert: ir.Value
    slot: ir.Value
    slots: ir.Value
    row: ir.Value
    rows: ir.Value
    sums: list[ir.Value]
    first: ir.Value


@dataclass(frozen=True)
class Machine:
    """The target, as options of the passes that lower products of experts.

    bits     the width of vectors
    tiles    whether it multiplies tiles of bf16
    streams  whether data that is read once arrives fastest when it bypasses the second-level cache
    """

    bits: int = 512
    tiles: bool = False
    streams: bool = False


class ExpertProduct:
    """The products of an op for experts."""

    def __init__(self, op: Any, machine: Machine, x: str, in_order: bool = False) -> None:
        self.op, self.machine, self.bits, self.in_order = op, machine, machine.bits, in_order
        bits = machine.bits
        self.storage = storage_of(op.operation)
        self.stored: Floats = stored_as(op.operation, bits)
        self.x, self.weight, self.scales, self.bias, self.positions, self.order = (
            buffer_of(getattr(op, name)) for name in (x, "weight", "scales", "bias", "positions", "order")
        )
        self.top, self.turned = ir.IntegerAttr(op.top).value, bool(ir.IntegerAttr(op.turned).value)
        self.lanes, self.vec = self.stored.lanes, self.stored.vec
        self.tiles = machine.tiles and self.stored.pair > 1
        few = few_turned.SLOTS if self.turned else few_slots.slots_at_once(bits)
        self.few = tuple(n for n in few if n <= _BESIDE_TILES) if self.tiles else few
        self.some = tuple(some_slots.SHAPES) if bits == some_slots.BITS and not self.turned else ()
        self.most_in_place = some_slots.MOST if self.some else max(self.few)
        self.many, self.slots = tile_slots.HEIGHTS if self.tiles else panels.HEIGHTS, SLOTS
        self.by_rows = self.tiles and not self.turned and isinstance(self.stored.element, ir.FloatType)
        self.width = panels.vectors_of(bits) * self.lanes
        self.few_rows = some_slots.LINE if self.some else _FEW_ROWS[self.turned]
        self.many_rows = tile_rows.ROWS if self.by_rows else self.width
        self.line = self.many_rows + (_APART if self.by_rows else 0)
        self.scratch = 4 * max(self.line * (SLOTS + max(self.many)), self.few_rows * self.most_in_place)

    @property
    def shared(self) -> int:
        """Bytes of a thread's workspace before its scratch memory: a panel, or the sums of few slots; then memory for tiles."""
        if not self.tiles:
            return self.before_tiles
        return self.before_tiles + max(tile_slots.BYTES, tile_rows.bytes_of(SLOTS) if self.by_rows else 0)

    @property
    def before_tiles(self) -> int:
        """Bytes of a thread's workspace before the memory for tiles."""
        packed = 4 * some_slots.DEPTH * max(self.some, default=0)
        return max(self.before_widened + 4 * many_slots.DEPTH * max(self.many), self.before_packed + packed)

    @property
    def before_widened(self) -> int:
        """Bytes of a thread's workspace before the widened columns of x: a panel, and its rows' scales."""
        return 4 * (many_slots.DEPTH + 1) * self.width

    @property
    def before_packed(self) -> int:
        """Bytes of a thread's workspace before the packed columns of x: the sums of few slots."""
        return 4 * max(*self.few, *self.some) * few_slots.HEIGHT * self.lanes

    def panel(self, workspace: ir.Value, base: ir.Value) -> ir.Value:
        """Returns the memory for packed columns of a weight and its rows' scales. A thread's workspace begins at `base`."""
        return panels.panel_at(workspace, base, many_slots.DEPTH + 1, self.width)

    def widened(self, workspace: ir.Value, base: ir.Value) -> ir.Value | None:
        """Returns the memory for columns of many slots as f32, by slot; None if x is not widened."""
        if self.stored.pair > 1 or isinstance(ir.MemRefType(self.x.type).element_type, ir.F32Type):
            return None
        kind = ir.MemRefType.get([max(self.many), many_slots.DEPTH], ir.F32Type.get())
        return memref.view(kind, workspace, arith.addi(base, index(self.before_widened)), [])

    def lines(self, workspace: ir.Value, base: ir.Value) -> ir.Value:
        """Returns the memory for the vectors of sums of few slots, before their lanes are added up."""
        kind = ir.MemRefType.get([max(*self.few, *self.some), few_slots.HEIGHT, self.lanes], ir.F32Type.get())
        return memref.view(kind, workspace, base, [])

    def sums(self, workspace: ir.Value, offset: ir.Value, slots: ir.Value) -> ir.Value:
        """Returns the scratch memory of a stream, [slot][row], for a block of `slots` slots."""
        rows = arith.select(self.are_few(slots), index(self.few_rows), index(self.line))
        open_ = ir.ShapedType.get_dynamic_size()
        kind = ir.MemRefType.get([open_, open_], ir.F32Type.get())
        return memref.view(kind, workspace, offset, [arith.divui(index(self.scratch // 4), rows), rows])

    def sums_of_many(self, workspace: ir.Value, offset: ir.Value) -> ir.Value:
        """Returns the same for many slots, whose number does not matter."""
        kind = ir.MemRefType.get([self.scratch // (4 * self.line), self.line], ir.F32Type.get())
        return memref.view(kind, workspace, offset, [])

    def are_few(self, slots: ir.Value) -> ir.Value:
        """Whether a block has so few slots that their weights are not packed."""
        return arith.cmpi(arith.CmpIPredicate.ule, slots, index(self.most_in_place))

    def rows_of(self, slots: ir.Value) -> ir.Value:
        """Returns the rows of a block of `slots` slots."""
        return arith.select(self.are_few(slots), index(self.few_rows), index(self.many_rows))

    def slot(self, number: ir.Value) -> ir.Value:
        """Returns the slot at a place of the sorted order."""
        return load_index(self.order, number)

    def token(self, slot: ir.Value) -> ir.Value:
        """Returns the token of a slot, which is a row of x."""
        return slot if self.top == 1 else arith.divui(slot, index(self.top))

    def lower(
        self,
        module: ir.Module,
        rows: ir.Value,
        streams: Sequence[ir.Value],
        finish: Callable[[Block], None],
        begin: Callable[[ir.Value, ir.Value], None] | None = None,
    ) -> None:
        """Replaces the op, which computes `rows` rows for each slot, by loops.

        streams  for each row of the weight that a row of the result needs: the first such row of an expert's weight
        finish   uses the sums of a block
        begin    prepares the rows [low, high) of the result for all slots. If it is given, slots are not shared out.
        """
        space = self.shared + self.scratch * len(streams)
        reserve_workspace(module, space)
        functions = functions_of(self)
        with ir.InsertionPoint(self.op):
            slots, experts = memref.dim(self.order, index(0)), arith.subi(memref.dim(self.positions, index(0)), index(1))
            columns = memref.dim(self.x, index(1))
            steps = arith.muli(arith.ceildivui(columns, index(self.stored.columns)), index(len(streams)))
            parts = parts_of(arith.muli(slots, rows), steps, self.storage.threads)
            units = arith.ceildivui(rows, index(UNIT))
            across = arith.maxui(arith.minui(parts, units), index(1))
            down = index(1) if begin is not None else arith.maxui(arith.divui(parts, across), index(1))
            with parallel(arith.muli(across, down)) as task:
                low, high = ends_of(units, arith.remui(task, across), across)
                low, high = arith.muli(low, index(UNIT)), arith.minui(arith.muli(high, index(UNIT)), rows)
                ends = ends_of(slots, arith.divui(task, across), down)
                base = arith.muli(thread_number(), index(space))
                if begin is not None:
                    begin(low, high)
                with loop(index(0), experts, index(1)) as each:
                    self._expert(each.induction_variable, ends, (low, high), streams, functions, base, finish)
        self.storage.erase()

    def _expert(
        self,
        expert: ir.Value,
        ends: tuple[ir.Value, ir.Value],
        rows: tuple[ir.Value, ir.Value],
        streams: Sequence[ir.Value],
        functions: Functions,
        base: ir.Value,
        finish: Callable[[Block], None],
    ) -> None:
        first = arith.maxui(load_index(self.positions, expert), ends[0])
        end = arith.minui(load_index(self.positions, arith.addi(expert, index(1))), ends[1])
        offsets = [arith.addi(base, index(self.shared + self.scratch * n)) for n in range(len(streams))]
        with loop(first, end, index(SLOTS)) as some:
            slot = some.induction_variable
            slots = arith.minui(index(SLOTS), arith.subi(end, slot))
            step = self.rows_of(slots)
            with loop(*rows, step) as blocks:
                row = blocks.induction_variable
                count = arith.minui(step, arith.subi(rows[1], row))
                sums = [self.sums(self.storage.workspace, at, slots) for at in offsets]
                first_rows = arith.cmpi(arith.CmpIPredicate.eq, row, rows[0])
                block = Block(expert, slot, slots, row, count, sums, first_rows)
                places = [arith.addi(stream, row) for stream in streams]
                following = [*places[1:], arith.addi(places[0], step)]
                for n, (place, after, at, own) in enumerate(zip(places, following, offsets, sums, strict=True)):
                    self._begin(own, block, place)
                    self._multiply(functions, block, (place, after), base, at, n > 0)
                finish(block)

    def _begin(self, sums: ir.Value, block: Block, place: ir.Value) -> None:
        """Stores the bias of the rows from a place on into all sums of a block; zeros without a bias."""
        biased = arith.cmpi(arith.CmpIPredicate.ugt, memref.dim(self.bias, index(0)), index(0))
        none = zeros(self.vec)
        choice = scf.IfOp(biased, has_else=True)
        with ir.InsertionPoint(choice.then_block):
            with loop(index(0), block.rows, index(1)) as rows:
                value = memref.load(self.bias, [block.expert, arith.addi(place, rows.induction_variable)])
                with loop(index(0), block.slots, index(1)) as slots:
                    memref.store(value, sums, [slots.induction_variable, rows.induction_variable])
            scf.YieldOp([])
        with ir.InsertionPoint(choice.else_block):
            with (
                loop(index(0), block.slots, index(1)) as slots,
                loop(index(0), block.rows, index(self.lanes)) as rows,
            ):
                vector.store(none, sums, [slots.induction_variable, rows.induction_variable])
            scf.YieldOp([])

    def _multiply(
        self,
        functions: Functions,
        block: Block,
        places: tuple[ir.Value, ir.Value],
        base: ir.Value,
        offset: ir.Value,
        again: bool,
    ) -> None:
        """Adds the products of the block's slots with the rows of the expert's weight.

        `places` are those of these rows and of the next ones. `again` says that another stream of the block came before.
        """
        last = arith.subi(arith.addi(block.slot, block.slots), index(1))
        columns = memref.dim(self.x, index(1))
        shared = [*self.memory(), base, offset, block.slot, last]
        few = scf.IfOp(self.are_few(block.slots), has_else=True)
        with ir.InsertionPoint(few.then_block):
            self._in_place(functions, block, places[0], shared)
            scf.YieldOp([])
        with ir.InsertionPoint(few.else_block):
            if functions.turn is None:
                self._by_panels(functions, block, places, shared)
            else:
                odd = arith.ori(arith.remui(block.rows, index(16)), arith.remui(columns, index(32)))
                fills = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, odd, index(0)), has_else=True)
                with ir.InsertionPoint(fills.then_block):
                    self._by_rows(functions, block, places, shared, again)
                    scf.YieldOp([])
                with ir.InsertionPoint(fills.else_block):
                    self._by_panels(functions, block, places, shared)
                    scf.YieldOp([])
            scf.YieldOp([])

    def _in_place(self, functions: Functions, block: Block, place: ir.Value, shared: list[ir.Value]) -> None:
        """Does the same for few slots, or for some if there are functions for them."""
        own = self._place(block.expert, place, index(0))
        given = [*shared, index(0), *own, block.rows]
        if not functions.some:
            call_narrowest(block.slots, functions.few, given)
            return
        few = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ule, block.slots, index(max(self.few))), has_else=True)
        with ir.InsertionPoint(few.then_block):
            call_narrowest(block.slots, functions.few, given)
            scf.YieldOp([])
        with ir.InsertionPoint(few.else_block):
            columns, depth, height = memref.dim(self.x, index(1)), index(some_slots.DEPTH), index(some_slots.ROWS)
            with (
                loop(index(0), columns, depth) as parts,
                loop(index(0), block.rows, height) as rows,
                loop(index(0), block.slots, index(max(self.some))) as slots,
            ):
                low, at, local = (each.induction_variable for each in (parts, rows, slots))
                own = self._place(block.expert, arith.addi(place, at), low)
                wide, high = arith.minui(depth, arith.subi(columns, low)), arith.minui(height, arith.subi(block.rows, at))
                call_narrowest(arith.subi(block.slots, local), functions.some, [*shared, local, low, wide, *own, high, at])
            scf.YieldOp([])

    def _by_panels(self, functions: Functions, block: Block, places: tuple[ir.Value, ir.Value], shared: list[ir.Value]) -> None:
        """Does the same for many slots, with some rows and columns at a time packed into a panel."""
        step, columns, base = index(many_slots.DEPTH * self.stored.pair), memref.dim(self.x, index(1)), shared[5]
        with loop(index(0), block.rows, index(self.width)) as some:
            at = some.induction_variable
            rows = arith.minui(index(self.width), arith.subi(block.rows, at))
            place, after = arith.addi(places[0], at), arith.addi(at, index(self.width))
            ends = arith.cmpi(arith.CmpIPredicate.uge, after, block.rows)
            after = arith.select(ends, places[1], arith.addi(places[0], after))
            with loop(index(0), columns, step) as parts:
                low = parts.induction_variable
                end = arith.minui(arith.addi(low, step), columns)
                depth, own = arith.subi(end, low), self._place(block.expert, place, low)
                more = arith.cmpi(arith.CmpIPredicate.ult, end, columns)
                next_place, column = arith.select(more, place, after), arith.select(more, end, index(0))
                following = self._place(block.expert, next_place, column)
                func.CallOp(functions.pack, [*self.memory(), base, *own, rows, depth, *following])
                with loop(index(0), block.slots, index(max(functions.many))) as tiles:
                    local = tiles.induction_variable
                    number = arith.divui(local, index(max(functions.many)))
                    given = [*shared, local, low, depth, *following, number, at]
                    call_narrowest(arith.subi(block.slots, local), functions.many, given)

    def _by_rows(
        self, functions: Functions, block: Block, places: tuple[ir.Value, ir.Value], shared: list[ir.Value], again: bool
    ) -> None:
        """Does the same for many slots, with the rows in place and x transposed, once if all its columns fit."""
        columns, tall = memref.dim(self.x, index(1)), index(max(tile_rows.HEIGHTS))
        wide = index(max(tile_rows.WIDTHS))
        tiles = arith.ceildivui(block.slots, wide)
        with loop(index(0), columns, index(tile_rows.DEPTH)) as parts:
            low = parts.induction_variable
            depth = arith.minui(arith.subi(columns, low), index(tile_rows.DEPTH))
            needed = arith.cmpi(arith.CmpIPredicate.ugt, columns, index(tile_rows.DEPTH))
            if not again:
                needed = arith.ori(needed, block.first)
            with ir.InsertionPoint(scf.IfOp(needed).then_block):
                func.CallOp(functions.turn, [*shared, index(0), block.slots, low, depth])
                scf.YieldOp([])
            with loop(index(0), block.rows, tall) as rows, loop(index(0), block.slots, wide) as slots:
                at, local = rows.induction_variable, slots.induction_variable
                after = arith.addi(at, tall)
                ends = arith.cmpi(arith.CmpIPredicate.uge, after, block.rows)
                after = arith.select(ends, places[1], arith.addi(places[0], after))
                own, (following, _) = (
                    self._place(block.expert, arith.addi(places[0], at), low),
                    self._place(block.expert, after, low),
                )
                lines = ends_of(tall, arith.divui(local, wide), tiles)
                given = [*shared, local, *own, at, depth, following, *lines]
                left = arith.subi(block.rows, at)
                whole = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, left, tall), has_else=True)
                for place, height in zip((whole.then_block, whole.else_block), tile_rows.HEIGHTS, strict=True):
                    with ir.InsertionPoint(place):
                        call_narrowest(arith.subi(block.slots, local), functions.rows[height], given)
                        scf.YieldOp([])

    def _place(self, expert: ir.Value, row: ir.Value, column: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the place of a row and a column of an expert's weight: the row of the memory, and the place in it."""
        if self.turned:
            row, column = column, row
        return arith.addi(arith.muli(expert, memref.dim(self.weight, index(1))), row), column

    def memory(self) -> list[ir.Value]:
        """Returns the memrefs that all functions take."""
        return [self.x, self.weight, self.scales, self.order, self.storage.workspace]


def store(value: ir.Value, memory: ir.Value, at: Sequence[ir.Value], left: ir.Value) -> None:
    """Stores the first `left` lanes of a vector."""
    vector.maskedstore(memory, list(at), mask_of(ir.VectorType(value.type).shape[0], left), value)
