"""lower-dots: lowers a scheduled `kernel.sample` to dot products of rows, several entries at a time.

before   %v = "kernel.sample"(%s) ({
           %0 = "kernel.read"(%x) {map = (i, j, k) -> (i, k)}
           %1 = "kernel.read"(%y) {map = (i, j, k) -> (j, k)}
           %2 = arith.mulf %0, %1
           "kernel.yield"(%2)
         }) {reduced = 1, lanes = 16, together = 4} : (tensor<?x?xf32, #CSR>) -> tensor<?xf32>
after    scf.parallel (%part) = ...                          // parts of equally many entries, and their rows
           for each row, for each 4 entries j0 ... j3 of the part in it
             for each 16 columns k: sums0 += x[row, k] * y[j0, k] ... sums3 += x[row, k] * y[j3, k]   // x is read once
             the 4 vectors of sums, added up across lanes together, into values                // the last entries masked

A part may end within a row. Runs on functions whose storage is exposed with the arrays of open operands
(expose-storage{arrays=true}).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.passes.loops.buffers import buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.prefetch import Ahead, elements_a_line, far
from gossamer.passes.loops.queries import dims, walk
from gossamer.passes.loops.row_shares import ends_of, first_row, parts_of
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import index, load_index, loop, mask_of, parallel, sums_across, vector_of, zeros

_AHEAD = Ahead.into(2, 8)


@dataclass(frozen=True)
class LowerDots:
    """Lower every scheduled kernel.sample."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sample"):
            if "lanes" in op.attributes:
                with op.location:
                    _Dots(op.opview).lower()


class _Dots:
    """values[p] = sum_k body(i, j, k) for the entries p = (i, j) of a CSR matrix."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.storage = storage_of(op.operation)
        self.lanes, self.together = (ir.IntegerAttr(op.attributes[name]).value for name in ("lanes", "together"))
        self.positions, self.coordinates, _ = sparse_buffers_of(op.pattern)
        *self.body, self.end = [inner.operation for inner in op.body.blocks[0].operations]
        reads = [inner for inner in self.body if inner.name == "kernel.read"]
        self.buffers = {read: buffer_of(read.operands[0]) for read in reads}
        self.maps = {read: dims(ir.AffineMapAttr(read.attributes["map"]).value) for read in reads}
        self.gathered = [read for read, places in self.maps.items() if places == [1, 2]]
        self.scalars = Scalars(ir.MemRefType(self.storage.output.type).element_type)
        self.wide = vector_of(self.lanes, self.scalars.wide)

    def lower(self) -> None:
        with ir.InsertionPoint(self.op):
            rows = arith.subi(memref.dim(self.positions, index(0)), index(1))
            entries, reduced = memref.dim(self.storage.output, index(0)), self._reduced()
            parts = parts_of(entries, arith.ceildivui(reduced, index(self.lanes)), self.storage.threads)
            self.last = arith.subi(entries, index(1))
            self.far = {read: far(self.buffers[read]) for read in self.gathered}
            with parallel(parts) as part:
                begin, end = ends_of(entries, part, parts)
                # The row before the first one that begins in the part may have entries in it.
                low = first_row(self.positions, rows, begin, rows_count=False)
                low = arith.subi(low, arith.minui(low, index(1)))
                with loop(low, first_row(self.positions, rows, end, rows_count=False), index(1)) as steps:
                    self._row(steps.induction_variable, begin, end, reduced)
        self.storage.erase()

    def _reduced(self) -> ir.Value:
        """Returns the size of the dimension that is summed over."""
        for read, places in self.maps.items():
            if places and places[-1] == 2:
                return memref.dim(self.buffers[read], index(len(places) - 1))
        raise CompileError(f"kernel.sample at {self.op.location}: nothing is read along the reduced dimension")

    def _row(self, row: ir.Value, begin: ir.Value, end: ir.Value, reduced: ir.Value) -> None:
        """Computes the entries of a row that are in [begin, end)."""
        begin = arith.maxui(load_index(self.positions, row), begin)
        end = arith.minui(load_index(self.positions, arith.addi(row, index(1))), end)
        count = arith.maxsi(arith.subi(end, begin), index(0))
        whole = arith.addi(begin, arith.subi(count, arith.remui(count, index(self.together))))
        for together, low, high in ((self.together, begin, whole), (1, whole, end)):
            with loop(low, high, index(together)) as groups:
                self._entries(row, groups.induction_variable, together, reduced)

    def _entries(self, row: ir.Value, first: ir.Value, together: int, reduced: ir.Value) -> None:
        """Computes the values of `together` entries of a row, from the first one on."""
        columns = [load_index(self.coordinates, arith.addi(first, index(n))) for n in range(together)]
        later = [arith.minui(arith.addi(first, index(_AHEAD.entries + n)), self.last) for n in range(together)]
        for read in self.gathered:
            with ir.InsertionPoint(scf.IfOp(self.far[read]).then_block):
                ahead = [load_index(self.coordinates, at) for at in later]
                with loop(index(0), reduced, index(elements_a_line(self.buffers[read]))) as lines:
                    for column in ahead:
                        _AHEAD.fetch(self.buffers[read], [column, lines.induction_variable])
                scf.YieldOp([])
        found = sums_across(self._sums(row, columns, reduced))
        narrow = vector_of(together, self.scalars.element)
        vector.store(found if found.type == narrow else arith.truncf(narrow, found), self.storage.output, [first])

    def _sums(self, row: ir.Value, columns: Sequence[ir.Value], reduced: ir.Value) -> list[ir.Value]:
        """Returns for each column a vector whose lanes add up to the sum over the reduced dimension."""
        zero = zeros(self.wide)
        whole = arith.subi(reduced, arith.remui(reduced, index(self.lanes)))
        sums = [zero] * len(columns)
        for low, high, valid in ((index(0), whole, None), (whole, reduced, arith.subi(reduced, whole))):
            mask = None if valid is None else mask_of(self.lanes, valid)
            with loop(low, high, index(self.lanes), sums) as steps:
                shared: dict[ir.Operation, ir.Value] = {}
                at = [self._at(row, column, steps.induction_variable, mask, shared) for column in columns]
                added = [self.scalars.add(total, each) for total, each in zip(steps.inner_iter_args, at, strict=True)]
                scf.YieldOp(added)
            sums = list(steps.results)
        return sums

    def _at(
        self, row: ir.Value, column: ir.Value, k: ir.Value, mask: ir.Value | None, shared: dict[ir.Operation, ir.Value]
    ) -> ir.Value:
        """Emits the body for `lanes` values of k. Masked lanes are 0.

        `shared` has the reads that do not depend on the column, so that they are emitted once.
        """
        values: dict[ir.Value, ir.Value] = {}
        for inner in self.body:
            if inner in self.maps:
                places = self.maps[inner]
                if 1 in places or inner not in shared:
                    at = [(row, column, k)[d] for d in places if d is not None]
                    shared[inner] = self._read(self.buffers[inner], at, mask) if 2 in places else self._splat(inner, at)
                values[inner.results[0]] = shared[inner]
            else:
                operands = [self._in_lanes(values.get(operand, operand)) for operand in inner.operands]
                attributes = {name: inner.attributes[name] for name in inner.attributes}
                type_ = vector_of(self.lanes, inner.results[0].type)
                clone = ir.Operation.create(inner.name, results=[type_], operands=operands, attributes=attributes)
                values[inner.results[0]] = clone.results[0]
        result = self._in_lanes(values.get(self.end.operands[0], self.end.operands[0]))
        return result if mask is None else arith.select(mask, result, self._zero(result.type))

    def _read(self, buffer: ir.Value, at: Sequence[ir.Value], mask: ir.Value | None) -> ir.Value:
        type_ = vector_of(self.lanes, ir.MemRefType(buffer.type).element_type)
        if mask is None:
            return vector.load(type_, buffer, at)
        return vector.maskedload(type_, buffer, at, mask, self._zero(type_))

    def _splat(self, read: ir.Operation, at: Sequence[ir.Value]) -> ir.Value:
        return self._in_lanes(memref.load(self.buffers[read], at))

    def _in_lanes(self, value: ir.Value) -> ir.Value:
        return value if isinstance(value.type, ir.VectorType) else vector.broadcast(vector_of(self.lanes, value.type), value)

    def _zero(self, type_: ir.Type) -> ir.Value:
        return zeros(ir.VectorType(type_))
