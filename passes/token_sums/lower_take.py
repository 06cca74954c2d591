"""lower-take: lowers a `kernel.take` to gathers of vectors, in equal parts.

before   %y = "kernel.take"(%values, %places) : (tensor<?xf32>, tensor<?xi32>) -> tensor<?xf32>
after    scf.parallel (%part) = ...
           y[p ... p + 15] = values[places[p ... p + 15]], or 0 if a place is negative

Runs on functions whose storage is exposed (expose-storage).
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith, memref, vector

from gossamer.passes.loops.buffers import buffer_of, storage_of
from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.row_shares import ends_of, parts_of
from gossamer.passes.loops.vectors import index, loop, mask_of, parallel, vector_of, zeros


@dataclass(frozen=True)
class LowerTake:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.take"):
            with op.location:
                self._lower(op)

    def _lower(self, op: ir.Operation) -> None:
        storage = storage_of(op)
        values, places = (buffer_of(operand) for operand in op.operands)
        element = ir.MemRefType(values.type).element_type
        lanes = self.bits // 8 // max(ir.FloatType(element).width // 8, 4)
        i32 = ir.IntegerType.get_signless(32)
        with ir.InsertionPoint(op):
            total = memref.dim(storage.output, index(0))
            parts = parts_of(total, index(1), storage.threads)
            with parallel(parts) as part:
                begin, end = ends_of(total, part, parts)
                whole = arith.addi(begin, arith.subi(arith.subi(end, begin), arith.remui(arith.subi(end, begin), index(lanes))))
                for low, high in ((begin, whole), (whole, end)):
                    with loop(low, high, index(lanes)) as steps:
                        at = steps.induction_variable
                        wanted, taken = vector_of(lanes, i32), vector_of(lanes, element)
                        there = mask_of(lanes, arith.subi(end, at))
                        none = arith.constant(wanted, ir.DenseElementsAttr.get_splat(wanted, ir.IntegerAttr.get(i32, -1)))
                        if high is whole:
                            where = vector.load(wanted, places, [at])
                        else:
                            where = vector.maskedload(wanted, places, [at], there, none)
                        stored = arith.cmpi(arith.CmpIPredicate.sgt, where, none)
                        found = vector.gather(taken, values, [index(0)], where, stored, zeros(taken))
                        if high is whole:
                            vector.store(found, storage.output, [at])
                        else:
                            vector.maskedstore(storage.output, [at], there, found)
        storage.erase()
