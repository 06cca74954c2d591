"""allow-approximations: functions whose results a chain rounds to 8 bits at once may be approximations.

before   %y = "kernel.spmm"(%x, %w) ({ ... math.erf %u : f32 ... })
         %max = "kernel.max"() ({ ... "kernel.read"(%y) ... })
         %q = "kernel.map"() ({ ... "kernel.read"(%y) ... arith.fptosi ... to i8 })
after    the same with math.erf %u fastmath<afn> : f32

Rounding moves a value by up to a 254th of the greatest one; expand-math says how much less an approximation does.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from gossamer.passes.loops.queries import all_ops, walk

_APPROXIMATE = "#arith.fastmath<afn>"


@dataclass(frozen=True)
class AllowApproximations:
    """Mark each `math.erf` in a product or a map that is read for its greatest magnitudes and as bytes alone."""

    name: ClassVar[str] = "allow-approximations"

    def run(self, module: ir.Module) -> None:
        for op in [*walk(module, "kernel.spmm"), *walk(module, "kernel.map")]:
            if all(_becomes_bytes(use.owner.operation) for use in op.results[0].uses):
                for function in all_ops(op):
                    if function.name == "math.erf":
                        function.attributes["fastmath"] = ir.Attribute.parse(_APPROXIMATE)


def _becomes_bytes(user: ir.Operation) -> bool:
    """Whether who uses a tensor reads it for a greatest value, which gives the scale of bytes, or makes bytes of it."""
    reader = user.parent
    if user.name != "kernel.read" or reader is None:
        return False
    element = ir.RankedTensorType(reader.operation.results[0].type).element_type
    return reader.operation.name == "kernel.max" or (reader.operation.name == "kernel.map" and str(element) == "i8")
