"""The sums of an expert's slots with rows of its weight: what the lowerings for experts share.

scf.parallel (%task) = ...                                   // equal shares of the rows; of the slots, too, where rows are few
  for each expert, for each 96 of its slots, for each 32 rows of the thread's share:
    the bias into scratch memory [slot][row]
    for each few slots: func.call @region_slots6(...)        // or _slots1, 2, 3, 4, 8
    what the op makes of the scratch memory
func.private @region_slots6(...)
  for each few rows:
    scf.for each vector of columns iter_args(6 slots x 4 rows of sums)
      multiply-adds; the rows that come after the 32 are fetched into a cache
    the totals of the sums, added to scratch memory

Weights stay where they are and are read once for 96 slots, those of experts without a slot not at all. Rows of x are read where
they are, too: no row is copied, or filled up. In the last few rows or slots the last one stands in for those that are missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

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
    sums_across,
    zeros,
)

BLOCK = 32
"""Rows of a weight: with 1024 columns of f32 they stay in a second-level cache."""
_SLOTS = 96
_UNIT = 16  # rows that are not shared out
_NEAR = 6 << 10  # bytes of a row of x from which on columns are taken in parts, so that a few rows stay in a first-level cache
_PART = 4 << 10

_TILES = {512: {8: 2, 6: 4, 4: 4, 3: 8, 2: 8, 1: 8}, 256: {3: 4, 2: 4, 1: 4}, 128: {6: 4, 4: 4, 3: 4, 2: 4, 1: 4}}
"""By the bits of vectors: slots whose sums with how many rows are in registers."""
_FEW = {512: 8, 256: 3, 128: 6}
_MANY = {512: 6, 256: 3, 128: 6}


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
        self.tiles = _TILES[bits]
        self.scratch = ir.MemRefType.get([_SLOTS + max(self.tiles), BLOCK], ir.F32Type.get())
        self.bytes = 4 * BLOCK * (_SLOTS + max(self.tiles))

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
        space = self.bytes * len(streams)
        reserve_workspace(module, space)
        functions = {slots: self._function(slots, height) for slots, height in self.tiles.items()}
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
        functions: dict[int, func.FuncOp],
        offset: ir.Value,
        finish: Callable[[Block], None],
    ) -> None:
        first = arith.maxui(load_index(self.positions, expert), ends[0])
        end = arith.minui(load_index(self.positions, arith.addi(expert, index(1))), ends[1])
        offsets = [arith.addi(offset, index(self.bytes * n)) for n in range(len(streams))]
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

    def _multiply(
        self, functions: dict[int, func.FuncOp], block: Block, place: ir.Value, step: ir.Value, offset: ir.Value
    ) -> None:
        """Adds the products of the block's slots with the rows of the weight from `place` on."""
        columns = memref.dim(self.x, index(1))
        few = arith.cmpi(arith.CmpIPredicate.ule, block.slots, index(_FEW[self.bits]))
        width = arith.select(few, block.slots, index(_MANY[self.bits]))
        size = 2 if self.stored.columns == 2 * self.lanes else 4
        part = columns
        if not isinstance(self.stored.element, ir.IntegerType):
            near = arith.cmpi(arith.CmpIPredicate.ule, columns, index(_NEAR // size))
            part = arith.select(arith.ori(few, near), columns, index(_PART // size))
        with loop(index(0), columns, arith.maxui(part, index(1))) as parts:
            begin = parts.induction_variable
            end = arith.minui(arith.addi(begin, part), columns)
            with loop(index(0), block.slots, width) as groups:
                local = groups.induction_variable
                last = arith.subi(arith.addi(block.slot, block.slots), index(1))
                arguments = [*self._memory(), offset, arith.addi(block.slot, local), last, local]
                left = arith.minui(width, arith.subi(block.slots, local))
                call_narrowest(left, functions, [*arguments, place, step, block.rows, begin, end])

    def _memory(self) -> list[ir.Value]:
        return [self.x, self.weight, self.scales, self.order, self.storage.workspace]

    def _function(self, slots: int, height: int) -> func.FuncOp:
        parent = self.op.operation.parent.opview
        types = [*(each.type for each in self._memory()), *[ir.IndexType.get()] * 9]
        with ir.InsertionPoint(parent):
            made = func.FuncOp(f"{parent.name.value}_slots{slots}", (types, []), visibility="private")
        with ir.InsertionPoint(made.add_entry_block()):
            _Tile(self, slots, height, *made.entry_block.arguments).emit()
            func.ReturnOp([])
        return made


class _Tile:
    """A few slots and all rows of a block, some of them at once."""

    def __init__(self, product: ExpertProduct, slots: int, height: int, *given: ir.Value) -> None:
        self.product, self.slots, self.height, self.stored = product, slots, height, product.stored
        self.x, weight, self.scales, order, workspace, offset, first, last, self.local = given[:9]
        self.place, self.step, self.rows, self.begin, self.end = given[9:]
        self.sums = memref.view(product.scratch, workspace, offset, [])
        numbers = [arith.minui(arith.addi(first, index(t)), last) for t in range(slots)]
        self.tokens = numbers if product.in_order else [product.token(load_index(order, number)) for number in numbers]
        self.stride = memref.dim(weight, index(2))
        self.line = _line(weight)

    def emit(self) -> None:
        last = arith.subi(self.rows, index(1))
        with loop(index(0), self.rows, index(self.height)) as tiles:
            row = tiles.induction_variable
            rows = [
                arith.addi(self.place, arith.muli(arith.minui(arith.addi(row, index(r)), last), self.step))
                for r in range(self.height)
            ]
            self._add(self._totals(rows), row)

    def _totals(self, rows: list[ir.Value]) -> list[ir.Value]:
        """A vector of sums for each slot and row, the rows of a slot one after the other."""
        starts = [arith.muli(row, self.stride) for row in rows]
        ahead = arith.muli(arith.muli(self.step, index(BLOCK)), self.stride)
        none = [zeros(self.stored.vec)] * (self.slots * self.height)
        if not isinstance(self.stored.element, ir.IntegerType):
            return self._steps(self.begin, self.end, starts, ahead, None, none)
        groups = memref.dim(self.scales, index(2))
        size = arith.divui(self.end, groups)
        flat = _line(self.scales)
        with loop(index(0), groups, index(1), none) as each:
            group = each.induction_variable
            at = [arith.addi(arith.muli(row, groups), group) for row in rows]
            scales = [vector.broadcast(self.stored.vec, memref.load(flat, [place])) for place in at]
            begin = arith.muli(group, size)
            found = self._steps(begin, arith.addi(begin, size), starts, ahead, scales, list(each.inner_iter_args))
            scf.YieldOp(found)
        return list(each.results)

    def _steps(
        self,
        begin: ir.Value,
        end: ir.Value,
        starts: list[ir.Value],
        ahead: ir.Value,
        scales: list[ir.Value] | None,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """The sums with the products of columns [begin, end)."""
        one, line = self.stored.columns, self.stored.columns * self.stored.line
        for step in dict.fromkeys((line, one)):
            whole = arith.addi(begin, arith.muli(arith.divui(arith.subi(end, begin), index(step)), index(step)))
            with loop(begin, whole, index(step), sums) as steps:
                found, column = list(steps.inner_iter_args), steps.induction_variable
                if step == line:
                    for start in starts:
                        memref.prefetch(self.line, [arith.addi(self._at(start, column), ahead)], False, 3, True)
                for n in range(step // one):
                    found = self._step(arith.addi(column, index(n * one)), starts, scales, found, None)
                scf.YieldOp(found)
            begin, sums = whole, list(steps.results)
        with loop(begin, end, index(one), sums) as rest:
            column = rest.induction_variable
            scf.YieldOp(self._step(column, starts, scales, list(rest.inner_iter_args), arith.subi(end, column)))
        return list(rest.results)

    def _at(self, start: ir.Value, column: ir.Value) -> ir.Value:
        return arith.addi(start, column if self.stored.stored(2) == 2 else arith.divui(column, index(2)))

    def _step(
        self,
        column: ir.Value,
        starts: list[ir.Value],
        scales: list[ir.Value] | None,
        sums: list[ir.Value],
        left: ir.Value | None,
    ) -> list[ir.Value]:
        found, stored = list(sums), self.stored
        x = [stored.x(self.x, token, column, left) for token in self.tokens]
        for r, start in enumerate(starts):
            weights = stored.weights(self.line, self._at(start, column), None if scales is None else scales[r], left)
            for t, own in enumerate(x):
                at = t * self.height + r
                found[at] = stored.multiplied(weights, own, found[at])
        return found

    def _add(self, sums: list[ir.Value], row: ir.Value) -> None:
        """The totals of sums, added to those in scratch memory."""
        together = max(1, self.product.lanes // self.height)
        slot, kind = 0, ir.VectorType.get([self.height], ir.F32Type.get())
        while slot < self.slots:
            count = 1 << min(together, self.slots - slot).bit_length() - 1
            totals = sums_across(sums[slot * self.height : (slot + count) * self.height])
            for t in range(count):
                own = vector.extract_strided_slice(kind, totals, [t * self.height], [self.height], [1])
                at = [arith.addi(self.local, index(slot + t)), row]
                vector.store(arith.addf(vector.load(kind, self.sums, at), own), self.sums, at)
            slot += count


def _line(memory: ir.Value) -> ir.Value:
    """A memory of three dimensions as a line."""
    open_ = ir.ShapedType.get_dynamic_size()
    sizes = [memref.dim(memory, index(d)) for d in range(3)]
    total = arith.muli(arith.muli(sizes[0], sizes[1]), sizes[2])
    type_ = ir.MemRefType.get([open_], ir.MemRefType(memory.type).element_type)
    return memref.ReinterpretCastOp(type_, memory, [], [total], [], [0], [open_], [1]).result


def lanes_of(memory: ir.Value, at: Sequence[ir.Value], vec: ir.VectorType) -> ir.Value:
    """A vector of sums."""
    return vector.load(vec, memory, list(at))


def store(value: ir.Value, memory: ir.Value, at: Sequence[ir.Value], left: ir.Value) -> None:
    """The first `left` lanes of a vector into a memory."""
    vector.maskedstore(memory, list(at), mask_of(ir.VectorType(value.type).shape[0], left), value)
