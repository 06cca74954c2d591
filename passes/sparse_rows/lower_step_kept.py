"""lower-step-kept: lowers a step of Adam to loops that copy the entries of a row, step them by vectors, and put them back.

before   "kernel.step_kept"(%positions, %coordinates, %gradient, %rates) : ... -> (tensor<?x?xf32>, tensor<?xf32>, ...)
after    scf.parallel (%part) = ...                                  // rows of the part
           for each row r
             w[part, p] = d[r, coordinates[p]]                       // for its entries p
             for each 16 entries
               m, s, w[part, p..] = the step of g[p..], m[p..], s[p..], w[part, p..]
             d[r, coordinates[p]] = w[part, p]

The row is in the first-level cache when it is written. Later rows are prefetched. `kernel.step_mapped` compresses vectors of a
row into w, and expands them from there, by the words of the map. Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, math, memref, vector

from gossamer.dialects.kept_steps import Rate
from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.prefetch import fetch_row
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import (
    byte_width,
    index,
    load_index,
    loop,
    mask_of,
    narrowed,
    parallel,
    rolled,
    vector_of,
    zeros,
)
from gossamer.passes.sparse_rows.mapped_rows import Line, MappedRows


@dataclass(frozen=True)
class LowerStepKept:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for kind in (_ByCoordinates, _ByMap):
            for op in walk(module, kind.name):
                with op.location:
                    kind(op, self.bits).lower()


class _Step:
    """The step of one parameter. Subclasses copy the entries of its rows."""

    name: str

    def __init__(self, op: ir.Operation, bits: int) -> None:
        self.op, self.storage = op, storage_of(op)
        self.positions, self.where, self.gradient, self.rates = (buffer_of(operand) for operand in op.operands)
        self.parameter, self.mean, self.square, self.work = self.storage.outputs
        element = ir.MemRefType(self.parameter.type).element_type
        self.lanes = bits // 8 // byte_width(element)
        self.vec = vector_of(self.lanes, element)

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            rows, columns = (memref.dim(self.parameter, index(n)) for n in (0, 1))
            parts = arith.minui(parts_of(rows, columns, self.storage.threads), memref.dim(self.work, index(0)))
            with parallel(parts) as part:
                rates = {rate: self._rate(rate) for rate in Rate}
                with loop(*ends_of(rows, part, parts), index(1)) as each:
                    row = each.induction_variable
                    first, last = (load_index(self.positions, at) for at in (row, arith.addi(row, index(1))))
                    self.take(row, part, first, last)
                    whole = arith.subi(last, arith.remui(arith.subi(last, first), index(self.lanes)))
                    with loop(first, whole, index(self.lanes)) as steps:
                        self._advance(steps.induction_variable, part, first, rates, None)
                    with loop(whole, last, index(self.lanes)) as steps:
                        at = steps.induction_variable
                        self._advance(at, part, first, rates, mask_of(self.lanes, arith.subi(last, at)))
                    self.put(row, part, first, last)
        self.storage.erase()

    def take(self, row: ir.Value, part: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """Copies the entries [first, last) of a row to the part's work."""
        raise NotImplementedError

    def put(self, row: ir.Value, part: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """Copies them back."""
        raise NotImplementedError

    def _rate(self, rate: Rate) -> ir.Value:
        return vector.broadcast(self.vec, narrowed(memref.load(self.rates, [index(rate)]), self.vec.element_type))

    def _advance(
        self, at: ir.Value, part: ir.Value, first: ir.Value, rates: dict[Rate, ir.Value], mask: ir.Value | None
    ) -> None:
        """Steps a vector of entries; with a mask, only its first ones."""
        own = [part, arith.subi(at, first)]
        places = [(self.work, own), (self.mean, [at]), (self.square, [at])]
        gradient = self._load(self.gradient, [at], mask)
        parameter, mean, square = (self._load(*place, mask) for place in places)
        g = vector.fma(rates[Rate.PENALTY], parameter, arith.mulf(rates[Rate.SIGN], gradient))
        mean = vector.fma(rates[Rate.MEAN], arith.subf(g, mean), mean)
        square = vector.fma(rates[Rate.SQUARE], arith.mulf(g, g), arith.mulf(rates[Rate.FORGET], square))
        under = vector.fma(rates[Rate.SCALE], math.sqrt(square), rates[Rate.EPSILON])
        moved = arith.divf(arith.mulf(rates[Rate.STEP], mean), under)
        stepped = arith.subf(arith.mulf(rates[Rate.DECAY], parameter), moved)
        for value, (buffer, place) in zip((stepped, mean, square), places, strict=True):
            if mask is None:
                vector.store(value, buffer, place)
            else:
                vector.maskedstore(buffer, place, mask, value)

    def _load(self, buffer: ir.Value, at: list[ir.Value], mask: ir.Value | None) -> ir.Value:
        if mask is None:
            return vector.load(self.vec, buffer, at)
        return vector.maskedload(self.vec, buffer, at, mask, zeros(self.vec))


class _ByCoordinates(_Step):
    name = "kernel.step_kept"

    def take(self, row: ir.Value, part: ir.Value, first: ir.Value, last: ir.Value) -> None:
        rows, columns = (memref.dim(self.parameter, index(n)) for n in (0, 1))
        fetch_row(self.parameter, row, rows, columns, to_write=True)
        with rolled(first, last) as each:
            entry = each.induction_variable
            value = memref.load(self.parameter, [row, load_index(self.where, entry)])
            memref.store(value, self.work, [part, arith.subi(entry, first)])

    def put(self, row: ir.Value, part: ir.Value, first: ir.Value, last: ir.Value) -> None:
        with rolled(first, last) as each:
            entry = each.induction_variable
            value = memref.load(self.work, [part, arith.subi(entry, first)])
            memref.store(value, self.parameter, [row, load_index(self.where, entry)])


class _ByMap(_Step):
    name = "kernel.step_mapped"

    def __init__(self, op: ir.Operation, bits: int) -> None:
        super().__init__(op, bits)
        self.rows = MappedRows(self.positions, self.where, self.parameter)

    def take(self, row: ir.Value, part: ir.Value, first: ir.Value, last: ir.Value) -> None:
        def compress(line: Line) -> list[ir.Value]:
            self.rows.fetch(line, to_write=True)
            self.rows.compress(line, self.work, [part, line.place])
            return []

        self.rows.row(row, compress, [index(0)])

    def put(self, row: ir.Value, part: ir.Value, first: ir.Value, last: ir.Value) -> None:
        def expand(line: Line) -> list[ir.Value]:
            values = self.rows.expanded(line, self.work, [part, line.place])
            vector.maskedstore(self.parameter, [line.row, line.column], line.mask, values)
            return []

        self.rows.row(row, expand, [index(0)])
