"""lower-reduce-edges: lowers a `kernel.reduce_edges` to one loop over rows, with a row's results in registers.

before   %y = "kernel.reduce_edges"(%a) ({ x[c, f] }) {kind = "max"}
after    scf.parallel (%part) = ...                      // rows that begin in the part's share of the entries
           for each row, for each 8 vectors of columns
             for each entry: largest = max(largest, x[column])
             largest into y, or 0 if there is no entry

Runs on functions whose storage is exposed with the arrays of open operands (expose-storage{arrays=true}).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.passes.loops.buffers import buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.loops.epilogue import on_lanes
from gossamer.passes.loops.queries import dims, walk
from gossamer.passes.loops.row_shares import parts_of, rows_of
from gossamer.passes.loops.vectors import index, load_index, loop, mask_of, parallel, zeros
from gossamer.passes.sparse_rows.segment_reductions import Reduction

_VECTORS = 8  # vectors of results at once; the other registers are for the operands


@dataclass(frozen=True)
class LowerReduceEdges:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.reduce_edges"):
            with op.location:
                _Reduce(op.opview, self.bits).replace()


class _Reduce:
    def __init__(self, op: Any, bits: int) -> None:
        pattern = ir.RankedTensorType(op.a.type)
        if Format.parse(str(pattern.encoding)).levels != Format.CSR.levels:
            raise CompileError(f"{op.operation.name} at {op.location}: its pattern is {pattern}, must be CSR")
        self.op, self.storage = op, storage_of(op.operation)
        self.positions, self.coordinates, _ = sparse_buffers_of(op.a)
        result = ir.RankedTensorType(op.result.type)
        self.columns, self.lanes = result.shape[1], bits // ir.FloatType(result.element_type).width
        self.reduction = Reduction(op.operation, self.lanes)
        *self.body, end = [inner.operation for inner in op.body.blocks[0].operations]
        self.wanted = end.operands[0]

    def replace(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            rows = arith.subi(memref.dim(self.positions, index(0)), index(1))
            entries = memref.dim(self.coordinates, index(0))
            parts = parts_of(entries, index(-(-self.columns // self.lanes) + 2), self.storage.threads)
            with parallel(parts) as part, loop(*rows_of(self.positions, rows, entries, part, parts), index(1)) as each:
                self._row(each.induction_variable)
        self.storage.erase()

    def _row(self, row: ir.Value) -> None:
        begin, end = (load_index(self.positions, at) for at in (row, arith.addi(row, index(1))))
        empty = arith.cmpi(arith.CmpIPredicate.eq, begin, end)
        places = range(0, self.columns, self.lanes)
        for first in range(0, len(places), _VECTORS):
            tile = places[first : first + _VECTORS]
            with loop(begin, end, index(1), [self.reduction.start() for _ in tile]) as entries:
                column = load_index(self.coordinates, entries.induction_variable)
                found = [self._value(row, column, at) for at in tile]
                scf.YieldOp([self.reduction.combine(a, b) for a, b in zip(entries.inner_iter_args, found, strict=True)])
            for at, result in zip(tile, entries.results, strict=True):
                value = arith.select(empty, zeros(self.reduction.type), result)
                vector.maskedstore(self.storage.output, [row, index(at)], self._mask(at), value)

    def _value(self, row: ir.Value, column: ir.Value, at: int) -> ir.Value:
        """Emits the body for a vector of columns of the result."""
        return on_lanes(self.body, {}, self.wanted, self.lanes, self._reader(row, column, at))

    def _reader(self, row: ir.Value, column: ir.Value, at: int) -> Callable[[ir.Operation, ir.VectorType], ir.Value]:
        def read(op: ir.Operation, type_: ir.VectorType) -> ir.Value:
            of_row = dims(ir.AffineMapAttr(op.attributes["map"]).value)[0] == 0
            place = [row if of_row else column, index(at)]
            return vector.maskedload(type_, buffer_of(op.operands[0]), place, self._mask(at), zeros(type_))

        return read

    def _mask(self, at: int) -> ir.Value:
        return mask_of(self.lanes, index(min(self.lanes, self.columns - at)))
