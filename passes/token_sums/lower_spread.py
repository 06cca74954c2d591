"""lower-spread: lowers a `kernel.spread` to loops that make each row in a buffer that stays in cache, then stream it out.

before   %d, %w = "kernel.spread"(%positions, %coordinates, %values) : ... -> tensor<?x?xf32>, tensor<?x?xf32>
after    scf.parallel (%part) = ...                                  // rows of the part
           w[part, :] = 0
           for each row r
             w[part, coordinates[p]] = values[p]                     // for its entries p
             d[r, :] = w[part, :]                                    // bypasses the caches if the matrix does not fit them
             w[part, coordinates[p]] = 0

So memory is written once, and not read. Rows that are not whole vectors are written through the caches. Runs on functions whose
storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, scf, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import byte_width, index, load_index, loop, mask_of, parallel, rolled, vector_of, zeros

_LARGE = 4 << 20  # bytes from which a matrix bypasses the caches when it is written


@dataclass(frozen=True)
class LowerSpread:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.spread"):
            with op.location:
                _Spread(op, self.bits).lower()


class _Spread:
    def __init__(self, op: ir.Operation, bits: int) -> None:
        self.op, self.storage = op, storage_of(op)
        self.positions, self.coordinates, self.values = (buffer_of(operand) for operand in op.operands)
        self.dense, self.work = self.storage.outputs
        self.element = ir.MemRefType(self.dense.type).element_type
        self.bytes = bits // 8
        self.lanes = self.bytes // byte_width(self.element)
        self.vec = vector_of(self.lanes, self.element)

    def lower(self) -> None:
        """Replaces the op by loops."""
        with ir.InsertionPoint(self.op):
            rows, columns = (memref.dim(self.dense, index(n)) for n in (0, 1))
            whole = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(columns, index(self.lanes)), index(0))
            size = arith.muli(arith.muli(rows, columns), index(byte_width(self.element)))
            large = arith.cmpi(arith.CmpIPredicate.uge, size, index(_LARGE))
            parts = arith.minui(parts_of(rows, columns, self.storage.threads), memref.dim(self.work, index(0)))
            with parallel(parts) as part:
                begin, end = ends_of(rows, part, parts)
                zero = arith.constant(self.element, ir.FloatAttr.get(self.element, 0.0))
                with rolled(index(0), columns) as each:
                    memref.store(zero, self.work, [part, each.induction_variable])
                choice = scf.IfOp(arith.andi(whole, large), has_else=True)
                for streams, block in ((True, choice.then_block), (False, choice.else_block)):
                    with ir.InsertionPoint(block):
                        with loop(begin, end, index(1)) as each:
                            self._row(each.induction_variable, part, columns, streams)
                        scf.YieldOp([])
        self.storage.erase()

    def _row(self, row: ir.Value, part: ir.Value, columns: ir.Value, streams: bool) -> None:
        first, last = (load_index(self.positions, at) for at in (row, arith.addi(row, index(1))))
        with rolled(first, last) as each:
            value = memref.load(self.values, [each.induction_variable])
            memref.store(value, self.work, [part, load_index(self.coordinates, each.induction_variable)])
        with loop(index(0), columns, index(self.lanes)) as each:
            at = each.induction_variable
            if streams:
                made = vector.load(self.vec, self.work, [part, at])
                vector.store(made, self.dense, [row, at], nontemporal=True, alignment=self.bytes)
            else:
                there = mask_of(self.lanes, arith.subi(columns, at))
                made = vector.maskedload(self.vec, self.work, [part, at], there, zeros(self.vec))
                vector.maskedstore(self.dense, [row, at], there, made)
        zero = arith.constant(self.element, ir.FloatAttr.get(self.element, 0.0))
        with rolled(first, last) as each:
            memref.store(zero, self.work, [part, load_index(self.coordinates, each.induction_variable)])
