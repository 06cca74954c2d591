"""sample-rows: schedules a `kernel.sample` at the entries of a CSR matrix that sums over one dimension by rows (SDDMM).

before   %v = "kernel.sample"(%s) ({ reads along (i, k) and (j, k), their product }) {reduced = 1}
after    %v = "kernel.sample"(%s) ({ ... }) {reduced = 1, lanes = 16, together = 4}

Vectors of `lanes` elements lie along the reduced dimension, so the tensors must be contiguous along it. The kernel finishes the
sums of `together` entries at once. Any other op in the region is an error, and the caller compiles the region with the
reference pipeline.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.elements import FLOATS
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.passes.loops.queries import all_ops, dims, walk
from gossamer.passes.loops.scalars import Scalars

_TOGETHER = 4  # independent chains of multiply-adds, few enough for short rows; must be a power of two


@dataclass(frozen=True)
class SampleRows:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.sample"):
            self._schedule(op)
        for op in all_ops(module.operation):
            if op.name.startswith("linalg."):
                raise CompileError(f"the dots schedule has no way to compute {op.name} at {op.location}")

    def _schedule(self, op: ir.Operation) -> None:
        pattern = ir.RankedTensorType(op.operands[0].type)
        if (
            Format.parse(str(pattern.encoding)).levels != Format.CSR.levels
            or ir.IntegerAttr(op.attributes["reduced"]).value != 1
        ):
            raise CompileError(
                f"the dots schedule sums over one dimension at the entries of CSR, not {op.name} at {op.location}"
            )
        if str(pattern.element_type) not in FLOATS:
            raise CompileError(f"the dots schedule computes with floats, not {pattern.element_type} at {op.location}")
        for read in [inner.operation for inner in op.regions[0].blocks[0].operations if inner.operation.name == "kernel.read"]:
            places = dims(ir.AffineMapAttr(read.attributes["map"]).value)
            if None in places or pattern.rank in places[:-1]:
                raise CompileError(f"the dots schedule reads along the last dimension, not by {read.attributes['map']}")
        wide = ir.FloatType(Scalars(pattern.element_type).wide)
        i64 = ir.IntegerType.get_signless(64)
        lanes = self.bits // wide.width
        op.attributes["lanes"] = ir.IntegerAttr.get(i64, lanes)
        op.attributes["together"] = ir.IntegerAttr.get(i64, min(_TOGETHER, lanes))
