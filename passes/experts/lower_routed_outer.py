"""lower-routed-outer: lowers a `kernel.routed_outer` to loops over experts, columns, rows and slots.

before   %y = "kernel.routed_outer"(%left, %right, %positions, %order) {left_top = 0, right_top = 8, dots = 0}
after    scf.parallel (%task) = ...                          // equal shares of the rows
           for each expert, for each 256 columns, for each 60 rows:
             for each 96 slots:
               func.call @region_right(...)                  // 96 slots x 64 columns, four times: panels
               func.call @region_left(...)                   // 96 slots x 60 rows
               for each panel, for each 6 rows: func.call @region_tile6(...)   // panels.py
             y[expert, rows, columns] = the sums

Rows of the operands are gathered into panels, just before they are used, so that panels stay in caches. The result is written
once.
Runs on functions whose storage is exposed (expose-storage).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.passes.experts import panels
from gossamer.passes.experts.expert_product import UNIT, store
from gossamer.passes.experts.stored_weights import Floats, Pairs
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.openmp import thread_number
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import (
    call_narrowest,
    index,
    load_index,
    loop,
    mask_of,
    narrowed,
    parallel,
    reserve_workspace,
    vector_of,
    zeros,
)

_DEPTH = 96  # lines of a panel
_LEFT = 64  # elements of a line of the left panel
_ROWS = 60  # elements of such a line that are used: whole tiles
_COLUMNS = 256  # columns of the result at once


@dataclass(frozen=True)
class LowerRoutedOuter:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.routed_outer"):
            with op.location:
                _Outer(op.opview, self.bits).lower(module)


@dataclass(frozen=True)
class _Part:
    """A part of an expert's result that a thread computes: rows [row, row + rows), columns [column, column + columns)."""

    expert: ir.Value
    row: ir.Value
    rows: ir.Value
    column: ir.Value
    columns: ir.Value


class _Outer:
    def __init__(self, op: Any, bits: int) -> None:
        self.op, self.storage = op, storage_of(op.operation)
        self.left, self.right, self.positions, self.order = (
            buffer_of(each) for each in (op.left, op.right, op.positions, op.order)
        )
        self.tops = [ir.IntegerAttr(each).value for each in (op.left_top, op.right_top)]
        element = ir.MemRefType(self.left.type).element_type
        self.stored: Floats = (Pairs if ir.IntegerAttr(op.dots).value else Floats)(bits // 32, element)
        self.lanes, self.vec, self.pair = self.stored.lanes, self.stored.vec, self.stored.pair
        self.kind = vector_of(self.lanes, element)
        self.width = panels.vectors_of(bits) * self.lanes
        self.panel_bytes, self.left_bytes = 4 * _DEPTH * self.width, 4 * _DEPTH * _LEFT
        self.before_sums = self.panel_bytes * (_COLUMNS // self.width) + self.left_bytes
        self.sum_kind = ir.MemRefType.get([_ROWS + max(panels.HEIGHTS), _COLUMNS], ir.F32Type.get())

    def lower(self, module: ir.Module) -> None:
        space = self.before_sums + 4 * (_ROWS + max(panels.HEIGHTS)) * _COLUMNS
        reserve_workspace(module, space)
        self._make_functions()
        out = self.storage.output
        with ir.InsertionPoint(self.op):
            experts, rows, columns = (memref.dim(out, index(d)) for d in range(3))
            entries = arith.maxui(memref.dim(self.order, index(0)), experts)
            parts = parts_of(arith.muli(entries, rows), arith.ceildivui(columns, index(self.lanes)), self.storage.threads)
            units = arith.ceildivui(rows, index(UNIT))
            parts = arith.minui(parts, units)
            with parallel(parts) as task:
                low, high = (arith.muli(end, index(UNIT)) for end in ends_of(units, task, parts))
                base, high = arith.muli(thread_number(), index(space)), arith.minui(high, rows)
                with loop(index(0), experts, index(1)) as each, loop(index(0), columns, index(_COLUMNS)) as some:
                    expert, column = each.induction_variable, some.induction_variable
                    ends = [load_index(self.positions, arith.addi(expert, index(n))) for n in (0, 1)]
                    wide = arith.minui(arith.subi(columns, column), index(_COLUMNS))
                    with loop(low, high, index(_ROWS)) as blocks:
                        row = blocks.induction_variable
                        tall = arith.minui(arith.subi(high, row), index(_ROWS))
                        again = arith.cmpi(arith.CmpIPredicate.eq, row, low)
                        self._part(_Part(expert, row, tall, column, wide), ends, again, base)
        self.storage.erase()

    def _part(self, part: _Part, ends: list[ir.Value], packs: ir.Value, base: ir.Value) -> None:
        """Computes a part of the result. `packs` says whether to pack the right panels even if they hold all slots of the
        expert."""
        first, end = ends
        step = index(_DEPTH * self.pair)
        there = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ugt, end, first), has_else=True)
        with ir.InsertionPoint(there.else_block):
            self._write(part, lambda row, column: zeros(self.kind))
            scf.YieldOp([])
        with ir.InsertionPoint(there.then_block):
            several = arith.cmpi(arith.CmpIPredicate.ugt, arith.subi(end, first), step)
            with loop(first, end, step) as some:
                slot = some.induction_variable
                count = arith.minui(arith.subi(end, slot), step)
                with ir.InsertionPoint(scf.IfOp(arith.ori(several, packs)).then_block):
                    with loop(index(0), part.columns, index(self.width)) as each:
                        at = each.induction_variable
                        given = [slot, count, arith.addi(part.column, at), arith.subi(part.columns, at)]
                        func.CallOp(self.pack_right, [*self.memory(), self._panel(base, at), *given])
                    scf.YieldOp([])
                own = arith.addi(base, index(self.before_sums - self.left_bytes))
                func.CallOp(self.pack_left, [*self.memory(), own, slot, count, part.row, part.rows])
                fresh = arith.select(arith.cmpi(arith.CmpIPredicate.eq, slot, first), index(1), index(0))
                lines = arith.ceildivui(count, index(self.pair))
                with loop(index(0), part.columns, index(self.width)) as each:
                    at = each.induction_variable
                    with loop(index(0), part.rows, index(max(panels.HEIGHTS))) as tiles:
                        row = tiles.induction_variable
                        given = [*self.memory(), base, self._panel(base, at), lines, row, at, fresh]
                        call_narrowest(arith.subi(part.rows, row), self.tiles, given)
            sums = self._sums(self.storage.workspace, base)
            self._write(part, lambda row, column: narrowed(vector.load(self.vec, sums, [row, column]), self.kind))
            scf.YieldOp([])

    def _write(self, part: _Part, value: Callable[[ir.Value, ir.Value], ir.Value]) -> None:
        """Stores values of a part into the result."""
        out, step = self.storage.output, index(self.lanes)
        whole = arith.subi(part.columns, arith.remui(part.columns, step))
        with loop(index(0), part.rows, index(1)) as rows:
            row = rows.induction_variable
            place = [part.expert, arith.addi(part.row, row)]
            with loop(index(0), whole, step) as each:
                at = each.induction_variable
                vector.store(value(row, at), out, [*place, arith.addi(part.column, at)])
            with loop(whole, part.columns, step) as rest:
                at = rest.induction_variable
                store(value(row, at), out, [*place, arith.addi(part.column, at)], arith.subi(part.columns, at))

    # The workspace of a thread: right panels, the left one, sums

    def _panel(self, base: ir.Value, column: ir.Value) -> ir.Value:
        return arith.addi(base, arith.muli(arith.divui(column, index(self.width)), index(self.panel_bytes)))

    def _sums(self, workspace: ir.Value, base: ir.Value) -> ir.Value:
        return memref.view(self.sum_kind, workspace, arith.addi(base, index(self.before_sums)), [])

    def memory(self) -> list[ir.Value]:
        """Returns the memrefs that all functions take."""
        return [self.left, self.right, self.order, self.storage.workspace]

    def _make_functions(self) -> None:
        self.pack_left = self._function("left", 5, lambda *given: self._pack(0, _LEFT, *given))
        self.pack_right = self._function("right", 5, lambda *given: self._pack(1, self.width, *given))
        self.tiles = {
            n: self._function(f"tile{n}", 6, lambda *given, height=n: self._tile(height, *given)) for n in panels.HEIGHTS
        }

    def _function(self, name: str, numbers: int, emit: Callable[..., None]) -> func.FuncOp:
        parent = self.op.operation.parent.opview
        types = [*(each.type for each in self.memory()), *[ir.IndexType.get()] * numbers]
        with ir.InsertionPoint(parent):
            made = func.FuncOp(f"{parent.name.value}_{name}", (types, []), visibility="private")
        with ir.InsertionPoint(made.add_entry_block()):
            emit(*made.entry_block.arguments)
            func.ReturnOp([])
        return made

    def _pack(self, side: int, width: int, *given: ir.Value) -> None:
        """Packs some slots' rows of an operand into a panel, from a column on."""
        *operands, order, workspace, offset, slot, count, column, left = given
        panel = panels.panel_at(workspace, offset, _DEPTH, width)
        full = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, left, index(width)), has_else=True)
        for block, some in ((full.then_block, None), (full.else_block, left)):
            with ir.InsertionPoint(block):
                with loop(index(0), count, index(self.pair)) as slots:
                    number = slots.induction_variable
                    places = [arith.addi(number, index(n)) for n in range(self.pair)]
                    rows = [self._row(side, order, slot, arith.minui(n, arith.subi(count, index(1)))) for n in places]
                    line = arith.divui(number, index(self.pair))
                    for v in range(0, width, self.pair * self.lanes):
                        read = [self._read(operands[side], row, arith.addi(column, index(v)), some, v) for row in rows]
                        if self.pair > 1:  # with an odd number of slots, half of the last line is zeros
                            there = arith.cmpi(arith.CmpIPredicate.ult, places[1], count)
                            read[1] = arith.select(there, read[1], zeros(ir.VectorType(read[1].type)))
                        for n, value in enumerate(self.stored.paired(read)):
                            vector.store(self.stored.word(value), panel, [line, index(v + n * self.lanes)])
                scf.YieldOp([])

    def _row(self, side: int, order: ir.Value, slot: ir.Value, number: ir.Value) -> ir.Value:
        place, top = arith.addi(slot, number), self.tops[side]
        if not top:
            return place
        own = load_index(order, place)
        return own if top == 1 else arith.divui(own, index(top))

    def _read(self, memory: ir.Value, row: ir.Value, column: ir.Value, left: ir.Value | None, begun: int) -> ir.Value:
        own = None if left is None else arith.subi(arith.maxui(left, index(begun)), index(begun))
        return self.stored.x(memory, row, column, own)[0]

    def _tile(self, height: int, *given: ir.Value) -> None:
        """Adds the products of some rows and a panel to the sums, which begin with 0 if `fresh` is 1."""
        _, _, _, workspace, base, offset, lines, row, column, fresh = given
        left = panels.panel_at(workspace, arith.addi(base, index(self.before_sums - self.left_bytes)), _DEPTH, _LEFT)
        sums, vectors = self._sums(workspace, base), self.width // self.lanes
        places = [
            [arith.addi(row, index(r)), arith.addi(column, index(v * self.lanes))]
            for r in range(height)
            for v in range(vectors)
        ]
        begun = arith.select(arith.cmpi(arith.CmpIPredicate.eq, fresh, index(1)), index(0), index(self.lanes))
        mask = mask_of(self.lanes, begun)
        before = [vector.maskedload(self.vec, sums, place, mask, zeros(self.vec)) for place in places]

        def elements(line: ir.Value) -> list[ir.Value]:
            found = [memref.load(left, [line, arith.addi(row, index(r))]) for r in range(height)]
            return [self.stored.of_word(vector.broadcast(self.vec, each)) for each in found]

        right = panels.panel_at(workspace, offset, _DEPTH, self.width)
        for total, place in zip(panels.multiplied(self.stored, right, lines, before, elements), places, strict=True):
            vector.store(total, sums, place)
