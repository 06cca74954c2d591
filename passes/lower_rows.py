"""lower-rows: a `kernel.gather_rows` becomes loops over the rows of the sparse matrix, cut into parts of equal nonzeros.

before   %y = "kernel.gather_rows"(%a, %x) {lanes = 16, vectors = 8} : (tensor<?x?xf32, #CSR>, tensor<?x?xf32>) -> ...
after    scf.parallel (%part) = ...                     // rows that begin in the part's share of the nonzeros
           for each 128 columns of x: func.call @region_columns8(...)    // or _columns7 ... 1 for the columns left
         func.func private @region_columns8(...)
           for each row, scf.for %p = positions[row] to positions[row + 1] iter_args(8 vectors of sums)
             vector.fma(values[p], x[coordinates[p], columns ...], sums)
           the sums into y                             // the last vector masked

Runs on functions whose storage is exposed with the arrays of open operands (expose-storage{arrays=true}).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir
from torch_mlir.dialects import arith, func, memref, scf, vector

from gossamer.passes.queries import walk
from gossamer.passes.storage import Storage, buffer_of, sparse_buffers_of, storage_of
from gossamer.passes.vectors import call_narrowest, index, load_index, loop, mask_of, vector_of, zeros


@dataclass(frozen=True)
class LowerRows:
    """Lower all of them."""

    name: ClassVar[str] = "lower-rows"

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.gather_rows"):
            with op.location:
                _Rows(op.opview).lower()


class _Rows:
    """y[m, n] = sum_p values[p] x[coordinates[p], n] over the entries p of row m."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.storage: Storage = storage_of(op.operation)
        self.lanes, self.vectors = ir.IntegerAttr(op.lanes).value, ir.IntegerAttr(op.vectors).value
        self.buffers = [*sparse_buffers_of(op.a), buffer_of(op.x), self.storage.output]
        self.vec = vector_of(self.lanes, ir.MemRefType(self.storage.output.type).element_type)

    def lower(self) -> None:
        variants = {n * self.lanes: self._function(n) for n in range(self.vectors, 0, -1)}
        with ir.InsertionPoint(self.op):
            positions, _, values, _, out = self.buffers
            rows, columns = memref.dim(out, index(0)), memref.dim(out, index(1))
            entries, parts = memref.dim(values, index(0)), self.storage.threads
            parallel = scf.ParallelOp([], [index(0)], [parts], [index(1)], [])
            block = ir.Block.create_at_start(parallel.region, [ir.IndexType.get()], [self.op.location])
            with ir.InsertionPoint(block):
                part = block.arguments[0]
                low, high = (
                    self._first_row(positions, rows, entries, parts, number) for number in (part, arith.addi(part, index(1)))
                )
                with loop(index(0), columns, index(self.vectors * self.lanes)) as tiles:
                    first = tiles.induction_variable
                    call_narrowest(arith.subi(columns, first), variants, [*self.buffers, first, low, high])
                scf.ReduceOp([], 0)
        self.storage.erase()

    def _first_row(self, positions: ir.Value, rows: ir.Value, entries: ir.Value, parts: ir.Value, part: ir.Value) -> ir.Value:
        """The first row of a part: its share of entries and rows, since a row costs about as much as an entry.

        By bisection for the first row with positions[row] + row >= part * (entries + rows) / parts.
        """
        share = arith.divui(arith.muli(part, arith.addi(entries, rows)), parts)
        search = scf.WhileOp([ir.IndexType.get()] * 2, [index(0), rows])
        before = ir.Block.create_at_start(search.before, [ir.IndexType.get()] * 2, [self.op.location] * 2)
        with ir.InsertionPoint(before):
            low, high = before.arguments
            scf.ConditionOp(arith.cmpi(arith.CmpIPredicate.ult, low, high), [low, high])
        after = ir.Block.create_at_start(search.after, [ir.IndexType.get()] * 2, [self.op.location] * 2)
        with ir.InsertionPoint(after):
            low, high = after.arguments
            middle = arith.shrui(arith.addi(low, high), index(1))
            begun = arith.addi(load_index(positions, middle), middle)
            right = arith.cmpi(arith.CmpIPredicate.ult, begun, share)
            next_ = arith.addi(middle, index(1))
            scf.YieldOp([arith.select(right, next_, low), arith.select(right, high, middle)])
        return search.results[0]

    def _function(self, count: int) -> func.FuncOp:
        """A function of the buffers, the first column and the rows [low, high), for up to `count` vectors of columns."""
        parent = self.op.operation.parent.opview
        types = [buffer.type for buffer in self.buffers] + [ir.IndexType.get()] * 3
        with ir.InsertionPoint(parent):
            function = func.FuncOp(f"{parent.name.value}_columns{count}", (types, []), visibility="private")
        with ir.InsertionPoint(function.add_entry_block()):
            *buffers, first, low, high = function.entry_block.arguments
            left = arith.subi(memref.dim(buffers[-1], index(1)), first)
            mask = mask_of(self.lanes, arith.minui(arith.subi(left, index((count - 1) * self.lanes)), index(self.lanes)))
            with loop(low, high, index(1)) as rows:
                self._row(buffers, rows.induction_variable, first, count, mask)
            func.ReturnOp([])
        return function

    def _row(self, buffers: Sequence[ir.Value], row: ir.Value, first: ir.Value, count: int, mask: ir.Value) -> None:
        positions, coordinates, values, x, out = buffers
        begin, end = load_index(positions, row), load_index(positions, arith.addi(row, index(1)))
        columns = [arith.addi(first, index(n * self.lanes)) for n in range(count)]
        with loop(begin, end, index(1), [zeros(self.vec)] * count) as entries:
            p = entries.induction_variable
            weight = vector.broadcast(self.vec, memref.load(values, [p]))
            source = load_index(coordinates, p)
            read = [vector.load(self.vec, x, [source, column]) for column in columns[:-1]]
            read.append(vector.maskedload(self.vec, x, [source, columns[-1]], mask, zeros(self.vec)))
            scf.YieldOp([vector.fma(weight, r, s) for r, s in zip(read, entries.inner_iter_args, strict=True)])
        for result, column in zip(entries.results[:-1], columns[:-1], strict=True):
            vector.store(result, out, [row, column])
        vector.maskedstore(out, [row, columns[-1]], mask, entries.results[-1])
