"""lower-collect: lowers a `kernel.collect` to loops that read the entries of each row of a matrix and prefetch later rows.

before   %v = "kernel.collect"(%positions, %coordinates, %dense) : (..., tensor<?x?xf32>) -> tensor<?xf32>
after    scf.parallel (%part) = ...                                  // rows of the part
           for each row r
             prefetch d[r + 4, :]                                    // each of its cache lines: most have an entry
             v[p] = d[r, coordinates[p]]                             // for its entries p

A `kernel.collect_counted` also counts the nonzeros of the row, by vectors, minus those among its entries:

             others[part] += sum(d[r, :] != 0) - sum(v[p] != 0)

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.prefetch import fetch_row
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, parallel, rolled, vector_of, zeros


@dataclass(frozen=True)
class LowerCollect:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in [*walk(module, "kernel.collect"), *walk(module, "kernel.collect_counted")]:
            with op.location:
                _lower(op, self.bits)


def _lower(op: ir.Operation, bits: int) -> None:
    storage = storage_of(op)
    positions, coordinates, dense = (buffer_of(operand) for operand in op.operands)
    values, *others = storage.outputs
    with ir.InsertionPoint(op):
        rows, columns = (memref.dim(dense, index(n)) for n in (0, 1))
        parts = parts_of(rows, columns, storage.threads)
        for each in others:
            parts = arith.minui(parts, memref.dim(each, index(0)))
        with parallel(parts) as part:
            begin, end = ends_of(rows, part, parts)
            none = [arith.constant(_count(), 0)] if others else []
            with loop(begin, end, index(1), none) as each_row:
                row = each_row.induction_variable
                fetch_row(dense, row, rows, columns)
                first, last = (load_index(positions, at) for at in (row, arith.addi(row, index(1))))
                with rolled(first, last, none) as entries:
                    value = memref.load(dense, [row, load_index(coordinates, entries.induction_variable)])
                    memref.store(value, values, [entries.induction_variable])
                    if others:
                        zero = arith.constant(value.type, ir.FloatAttr.get(value.type, 0.0))
                        found = arith.extui(_count(), arith.cmpf(arith.CmpFPredicate.UNE, value, zero))
                        scf.YieldOp([arith.addi(entries.inner_iter_args[0], found)])
                if others:
                    more = arith.subi(_nonzeros(dense, row, columns, bits), entries.results[0])
                    scf.YieldOp([arith.addi(each_row.inner_iter_args[0], more)])
            for each in others:
                memref.store(each_row.results[0], each, [part])
    storage.erase()


def _count() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _nonzeros(dense: ir.Value, row: ir.Value, columns: ir.Value, bits: int) -> ir.Value:
    """Returns the number of nonzeros of a row. A NaN is one."""
    element = ir.MemRefType(dense.type).element_type
    lanes = bits // 8 // byte_width(element)
    narrow = ir.IntegerType.get_signless(8 * byte_width(element))
    with loop(index(0), columns, index(lanes), [zeros(vector_of(lanes, narrow))]) as each:
        at, nothing = each.induction_variable, zeros(vector_of(lanes, element))
        loaded = vector.maskedload(nothing.type, dense, [row, at], mask_of(lanes, arith.subi(columns, at)), nothing)
        found = arith.cmpf(arith.CmpFPredicate.UNE, loaded, nothing)
        scf.YieldOp([arith.addi(each.inner_iter_args[0], arith.extui(vector_of(lanes, narrow), found))])
    total = vector.reduction(narrow, vector.CombiningKind.ADD, each.results[0])
    return total if narrow == _count() else arith.extui(_count(), total)
