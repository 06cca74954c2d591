"""The sums of an expert's slots with rows of its weight: what the lowerings for experts share.

scf.parallel (%task) = ...                                   // equal shares of the rows; of the slots, too, where rows are few
  for each expert, for each 96 of its slots, for each 32 rows of the thread's share:
    the bias into scratch memory [slot][row]
    at most 8 slots:  func.call @region_few8(...)            // or _few1, 2, 3, 4, 6: all of them, row by row (few_slots.py)
    more:             for each 8 rows or all 32, for each 6 slots: func.call @region_many6(...)   // many_slots.py
    what the op makes of the scratch memory

Weights stay where they are and are read from memory once for 96 slots, those of experts without a slot not at all. Rows of x
are read where they are, too: no row is copied, or filled up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.passes.experts import few_slots, many_slots
from gossamer.passes.experts.slot_tile import BLOCK
from gossamer.passes.experts.stored_weights import Floats, stored_as
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import (
    byte_width,
    call_narrowest,
    index,
    load_index,
    loop,
    mask_of,
    parallel,
    reserve_workspace,
    zeros,
)

_SLOTS = 96  # of an expert at once: their rows of x stay in a second-level cache
_UNIT = 16  # rows that are not shared out
_NEAR = 6 << 10  # bytes of a row of x from which on columns are taken in parts, so that some rows stay in a first-level cache
_PART = 4 << 10
_SOON = 4  # passes over the slots up to which rows are taken 8 at a time, since reading the weights is most of the work


@dataclass(frozen=True)
class Rows:
    """Rows of each expert's weight, one for each row that the op computes: first, first + step, first + 2 step …"""

    first: ir.Value
    step: int = 1


@dataclass(frozen=True)
class Block:
    """Some slots of an expert and some rows.

    expert, slot, slots    which expert, the first slot in sorted order, how many
    row, rows              the first row, how many
    sums                   [slot][row] f32, one for each of the Rows of an op
    """

    expert: ir.Value
    slot: ir.Value
    slots: ir.Value
    row: ir.Value
    rows: ir.Value
    sums: list[ir.Value]


@dataclass(frozen=True)
class Functions:
    """Those that add the products of some slots: for a few by their number, the most first, and for many."""

    few: dict[int, func.FuncOp]
    many: func.FuncOp


class ExpertProduct:
    """The products of an op for experts, on vectors of `bits`."""

    def __init__(self, op: Any, bits: int, x: str, in_order: bool = False) -> None:
        self.op, self.bits, self.in_order = op, bits, in_order
        self.storage = storage_of(op.operation)
        self.stored: Floats = stored_as(op.operation, bits)
        self.x, self.weight, self.scales, self.bias, self.positions, self.order = (
            buffer_of(getattr(op, name)) for name in (x, "weight", "scales", "bias", "positions", "order")
        )
        self.top = ir.IntegerAttr(op.top).value
        self.lanes, self.vec = self.stored.lanes, self.stored.vec
        self.few, self.many = few_slots.slots_at_once(bits), many_slots.SLOTS[bits]
        self.scratch = ir.MemRefType.get([_SLOTS + self.many, BLOCK], ir.F32Type.get())
        self.bytes = 4 * BLOCK * (_SLOTS + self.many)
        self.lines = ir.MemRefType.get([max(self.few), few_slots.HEIGHT, self.lanes], ir.F32Type.get())
        self.space = self.bytes + 4 * max(self.few) * few_slots.HEIGHT * self.lanes

    def slot(self, number: ir.Value) -> ir.Value:
        """The slot at a place of the sorted order."""
        return load_index(self.order, number)

    def token(self, slot: ir.Value) -> ir.Value:
        """Whose slot it is; the row of x."""
        return slot if self.top == 1 else arith.divui(slot, index(self.top))

    def lower(
        self,
        module: ir.Module,
        rows: ir.Value,
        streams: Sequence[Rows],
        finish: Callable[[Block], None],
        begin: Callable[[ir.Value, ir.Value], None] | None = None,
    ) -> None:
        """Put loops in place of the op, which computes so many `rows` for each slot.

        finish  uses the sums of a block
        begin   prepares the rows [low, high) of the result for all slots; then the slots are not shared out
        """
        space = self.space * len(streams)
        reserve_workspace(module, space)
        functions = self._functions()
        with ir.InsertionPoint(self.op):
            slots, experts = memref.dim(self.order, index(0)), arith.subi(memref.dim(self.positions, index(0)), index(1))
            columns = memref.dim(self.x, index(1))
            steps = arith.muli(arith.ceildivui(columns, index(self.stored.columns)), index(len(streams)))
            parts = parts_of(arith.muli(slots, rows), steps, self.storage.threads)
            units = arith.ceildivui(rows, index(_UNIT))
            across = arith.maxui(arith.minui(parts, units), index(1))
            down = index(1) if begin is not None else arith.maxui(arith.divui(parts, across), index(1))
            with parallel(arith.muli(across, down)) as task:
                low, high = ends_of(units, arith.remui(task, across), across)
                low, high = arith.muli(low, index(_UNIT)), arith.minui(arith.muli(high, index(_UNIT)), rows)
                ends = ends_of(slots, arith.divui(task, across), down)
                offset = arith.muli(thread_number(), index(space))
                if begin is not None:
                    begin(low, high)
                with loop(index(0), experts, index(1)) as each:
                    self._expert(each.induction_variable, ends, (low, high), streams, functions, offset, finish)
        self.storage.erase()

    def _expert(
        self,
        expert: ir.Value,
        ends: tuple[ir.Value, ir.Value],
        rows: tuple[ir.Value, ir.Value],
        streams: Sequence[Rows],
        functions: Functions,
        offset: ir.Value,
        finish: Callable[[Block], None],
    ) -> None:
        first = arith.maxui(load_index(self.positions, expert), ends[0])
        end = arith.minui(load_index(self.positions, arith.addi(expert, index(1))), ends[1])
        offsets = [arith.addi(offset, index(self.space * n)) for n in range(len(streams))]
        with loop(first, end, index(_SLOTS)) as some:
            slot = some.induction_variable
            slots = arith.minui(index(_SLOTS), arith.subi(end, slot))
            with loop(*rows, index(BLOCK)) as blocks:
                row = blocks.induction_variable
                count = arith.minui(index(BLOCK), arith.subi(rows[1], row))
                sums = [memref.view(self.scratch, self.storage.workspace, at, []) for at in offsets]
                block = Block(expert, slot, slots, row, count, sums)
                for stream, at, own in zip(streams, offsets, sums, strict=True):
                    origin = arith.muli(expert, self.all_rows())
                    place = arith.addi(origin, arith.addi(stream.first, arith.muli(row, index(stream.step))))
                    self._begin(own, block, stream)
                    self._multiply(functions, block, place, index(stream.step), at)
                finish(block)

    def all_rows(self) -> ir.Value:
        """Of the weight of an expert."""
        return memref.dim(self.weight, index(1))

    def _begin(self, sums: ir.Value, block: Block, stream: Rows) -> None:
        """The bias into all sums of a block; zeros without one."""
        biased = arith.cmpi(arith.CmpIPredicate.ugt, memref.dim(self.bias, index(0)), index(0))
        none = zeros(self.vec)
        choice = scf.IfOp(biased, has_else=True)
        with ir.InsertionPoint(choice.then_block):
            with loop(index(0), block.rows, index(1)) as rows:
                row = arith.addi(block.row, rows.induction_variable)
                at = arith.addi(stream.first, arith.muli(row, index(stream.step)))
                value = memref.load(self.bias, [block.expert, at])
                with loop(index(0), block.slots, index(1)) as slots:
                    memref.store(value, sums, [slots.induction_variable, rows.induction_variable])
            scf.YieldOp([])
        with ir.InsertionPoint(choice.else_block):
            with loop(index(0), block.slots, index(1)) as slots:
                for v in range(0, BLOCK, self.lanes):
                    vector.store(none, sums, [slots.induction_variable, index(v)])
            scf.YieldOp([])

    def _multiply(self, functions: Functions, block: Block, place: ir.Value, step: ir.Value, offset: ir.Value) -> None:
        """Adds the products of the block's slots with the rows of the weight from `place` on."""
        last = arith.subi(arith.addi(block.slot, block.slots), index(1))
        shared = [*self.memory(), offset, block.slot, last]
        columns = memref.dim(self.x, index(1))
        few = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ule, block.slots, index(max(functions.few))), has_else=True)
        with ir.InsertionPoint(few.then_block):
            call_narrowest(block.slots, functions.few, [*shared, index(0), place, step, block.rows])
            scf.YieldOp([])
        with ir.InsertionPoint(few.else_block):
            passes = arith.ceildivui(block.slots, index(self.many))
            soon = arith.cmpi(arith.CmpIPredicate.ule, passes, index(_SOON))
            height = arith.select(soon, index(2 * many_slots.ROWS), index(BLOCK))
            with loop(index(0), columns, self._part(columns)) as parts:
                begin = parts.induction_variable
                end = arith.minui(arith.addi(begin, self._part(columns)), columns)
                with loop(index(0), block.rows, height) as rows, loop(index(0), block.slots, index(self.many)) as slots:
                    row, local = rows.induction_variable, slots.induction_variable
                    count = arith.minui(height, arith.subi(block.rows, row))
                    fetched = [*many_slots.fetched(arith.divui(local, index(self.many)), passes), height]
                    func.CallOp(functions.many, [*shared, local, place, step, row, count, begin, end, *fetched])
            scf.YieldOp([])

    def _part(self, columns: ir.Value) -> ir.Value:
        """How many columns are multiplied at once."""
        size = byte_width(ir.MemRefType(self.x.type).element_type)
        near = arith.cmpi(arith.CmpIPredicate.ule, columns, index(_NEAR // size))
        return arith.maxui(arith.select(near, columns, index(_PART // size)), index(1))

    def memory(self) -> list[ir.Value]:
        """What functions for tiles work on."""
        return [self.x, self.weight, self.scales, self.order, self.storage.workspace]

    def _functions(self) -> Functions:
        few = {slots: self._function(f"few{slots}", 7, few_slots.FewSlots, slots) for slots in self.few}
        return Functions(few, self._function(f"many{self.many}", 13, many_slots.ManySlots, self.many))

    def _function(self, name: str, numbers: int, tile: Any, slots: int) -> func.FuncOp:
        parent = self.op.operation.parent.opview
        types = [*(each.type for each in self.memory()), *[ir.IndexType.get()] * numbers]
        with ir.InsertionPoint(parent):
            made = func.FuncOp(f"{parent.name.value}_{name}", (types, []), visibility="private")
        with ir.InsertionPoint(made.add_entry_block()):
            tile(self, slots, *made.entry_block.arguments).emit()
            func.ReturnOp([])
        return made


def store(value: ir.Value, memory: ir.Value, at: Sequence[ir.Value], left: ir.Value) -> None:
    """The first `left` lanes of a vector into a memory."""
    vector.maskedstore(memory, list(at), mask_of(ir.VectorType(value.type).shape[0], left), value)
