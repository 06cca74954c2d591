"""lower-put: lowers a `kernel.put` to loops that write the entries of each row of a matrix and prefetch later rows.

before   %d = "kernel.put"(%positions, %coordinates, %values) : (..., tensor<?xf32>) -> tensor<?x?xf32>
after    scf.parallel (%part) = ...                                  // rows of the part
           for each row r
             prefetch d[r + 4, :]                                    // each of its cache lines: most have an entry
             d[r, coordinates[p]] = v[p]                             // for its entries p

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.prefetch import fetch_row
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import index, load_index, loop, parallel, rolled


@dataclass(frozen=True)
class LowerPut:
    """Lower kernel.put to loops over rows and entries."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.put"):
            with op.location:
                _lower(op)


def _lower(op: ir.Operation) -> None:
    storage = storage_of(op)
    positions, coordinates, values = (buffer_of(operand) for operand in op.operands)
    dense = storage.output
    with ir.InsertionPoint(op):
        rows, columns = (memref.dim(dense, index(n)) for n in (0, 1))
        parts = parts_of(rows, columns, storage.threads)
        with parallel(parts) as part, loop(*ends_of(rows, part, parts), index(1)) as each:
            row = each.induction_variable
            fetch_row(dense, row, rows, columns, to_write=True)
            first, last = (load_index(positions, at) for at in (row, arith.addi(row, index(1))))
            with rolled(first, last) as entries:
                value = memref.load(values, [entries.induction_variable])
                memref.store(value, dense, [row, load_index(coordinates, entries.induction_variable)])
    storage.erase()
