"""lower-collect: a `kernel.collect` reads the entries of each row of a matrix, while rows to come are fetched.

before   %v = "kernel.collect"(%positions, %coordinates, %dense) : (..., tensor<?x?xf32>) -> tensor<?xf32>
after    scf.parallel (%part) = ...                                  // rows of the part
           for each row r
             prefetch d[r + 4, :]                                    // each of its cache lines: most have an entry
             v[p] = d[r, coordinates[p]]                             // for its entries p

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, parallel, rolled

_AHEAD = 4  # rows
_LINE = 64  # bytes


@dataclass(frozen=True)
class LowerCollect:
    """Lower it to loops over rows and entries."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.collect"):
            with op.location:
                _lower(op)


def _lower(op: ir.Operation) -> None:
    storage = storage_of(op)
    positions, coordinates, dense = (buffer_of(operand) for operand in op.operands)
    width = byte_width(ir.MemRefType(dense.type).element_type)
    with ir.InsertionPoint(op):
        rows, columns = (memref.dim(dense, index(n)) for n in (0, 1))
        parts = parts_of(rows, columns, storage.threads)
        with parallel(parts) as part:
            begin, end = ends_of(rows, part, parts)
            with loop(begin, end, index(1)) as each:
                row = each.induction_variable
                later = arith.minui(arith.addi(row, index(_AHEAD)), arith.subi(rows, index(1)))
                with loop(index(0), columns, index(max(_LINE // width, 1))) as lines:
                    memref.prefetch(dense, [later, lines.induction_variable], False, 3, True)
                first, last = (load_index(positions, at) for at in (row, arith.addi(row, index(1))))
                with rolled(first, last) as entries:
                    entry = entries.induction_variable
                    memref.store(memref.load(dense, [row, load_index(coordinates, entry)]), storage.output, [entry])
    storage.erase()
