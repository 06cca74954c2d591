"""lower-take-in-order: lowers a `kernel.take_in_order` to loops over a packing, which read each row of a matrix in its order.

before   %y, %e = "kernel.take_in_order"(%values, %starts, %positions, %coordinates) <{panel = 352, scale = 8}> : ...
after    scf.parallel (%part) = ...                                  // panels of the part
           ends[r] = starts[r]                                       // for the rows r of a panel
           for each column of the panel, each 4 of its entries p
             r = the panel's first row + coordinates[p] / 8
             y[p] = values[ends[r]], ends[r] += 1                    // padding repeats a coordinate: y[p] = 0, ends[r] += 0

With `panel = 0`, threads share out rows, and a row is read through all panels. Runs on functions whose storage is exposed
(expose-storage).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf

from gossamer.dialects.packing import Padded
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import index, load_index, loop, parallel


@dataclass(frozen=True)
class LowerTakeInOrder:
    """Lower kernel.take_in_order to loops over panels, rows and entries."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.take_in_order"):
            with op.location:
                _Take(op).lower()


class _Take:
    def __init__(self, op: ir.Operation) -> None:
        self.op, self.storage = op, storage_of(op)
        self.values, self.starts, self.positions, self.coordinates = (buffer_of(operand) for operand in op.operands)
        self.taken, self.ends = self.storage.outputs
        self.panel, self.scale = (ir.IntegerAttr(op.attributes[name]).value for name in ("panel", "scale"))

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            entries = memref.dim(self.coordinates, index(0))
            lines = arith.subi(memref.dim(self.positions, index(0)), index(1))
            rows = arith.subi(memref.dim(self.starts, index(0)), index(1))
            shared = arith.ceildivui(rows, index(self.panel)) if self.panel else rows
            others = arith.divui(lines, arith.maxui(shared, index(1)))
            parts = parts_of(entries, index(1), self.storage.threads)
            with parallel(parts) as part:
                begin, end = ends_of(shared, part, parts)
                with loop(begin, end, index(1)) as each:
                    if self.panel:
                        self._panel(each.induction_variable, rows, others)
                    else:
                        self._row(each.induction_variable, rows, others)
        self.storage.erase()

    def _row(self, row: ir.Value, rows: ir.Value, panels: ir.Value) -> None:
        """Copies a row through all panels."""
        with loop(index(0), panels, index(1), [load_index(self.starts, row)]) as each:
            line = arith.addi(arith.muli(each.induction_variable, rows), row)
            (at,) = self._line(line, [each.inner_iter_args[0]])
            scf.YieldOp([at])
        self._store_end(each.results[0], row)

    def _panel(self, panel: ir.Value, rows: ir.Value, columns: ir.Value) -> None:
        """Copies all columns of a panel of rows."""
        first = arith.muli(panel, index(self.panel))
        with loop(first, arith.minui(arith.addi(first, index(self.panel)), rows), index(1)) as each:
            self._store_end(load_index(self.starts, each.induction_variable), each.induction_variable)
        with loop(index(0), columns, index(1)) as each:
            self._line(arith.addi(arith.muli(panel, columns), each.induction_variable), [], first)

    def _line(self, line: ir.Value, at: Sequence[ir.Value], first: ir.Value | None = None) -> list[ir.Value]:
        """Copies the entries of a line of the packing: of the row that is read `at` a place, or of rows from `first` on.

        Returns the place after the row's entries.
        """
        begin, end = (load_index(self.positions, place) for place in (line, arith.addi(line, index(1))))
        with loop(begin, end, index(Padded.GROUP), [index(-1), *at]) as groups:
            before, *place = groups.inner_iter_args
            for number in range(Padded.GROUP):
                entry = arith.addi(groups.induction_variable, index(number))
                coordinate = load_index(self.coordinates, entry)
                row = arith.addi(first, arith.divui(coordinate, index(self.scale))) if first is not None else None
                read = load_index(self.ends, row) if row is not None else place[0]
                behind = self._entry(entry, arith.cmpi(arith.CmpIPredicate.ne, coordinate, before), read)
                if row is not None:
                    self._store_end(behind, row)
                before, place = coordinate, place and [behind]
            scf.YieldOp([before, *place])
        return list(groups.results)[1:]

    def _entry(self, entry: ir.Value, new: ir.Value, read: ir.Value) -> ir.Value:
        """Copies an entry. Returns how far its row is read then.

        Padding (not `new`) reads the previous value again, because that may be the last one of the matrix, and stores 0.
        """
        behind = arith.addi(read, arith.index_castui(ir.IndexType.get(), new))
        value = memref.load(self.values, [arith.subi(behind, index(1))])
        zero = arith.constant(value.type, ir.FloatAttr.get(value.type, 0.0))
        memref.store(arith.select(new, value, zero), self.taken, [entry])
        return behind

    def _store_end(self, end: ir.Value, row: ir.Value) -> None:
        memref.store(arith.index_castui(ir.MemRefType(self.ends.type).element_type, end), self.ends, [row])
