"""keep-wide: removes a rounding to a narrow float that is widened again at once.

before   %1 = arith.truncf %0 : f32 to bf16
         %2 = arith.extf %1 : bf16 to f32
         %3 = math.erf %2 : f32
after    %3 = math.erf %0 : f32

Eager torch rounds after every op because results go through memory. Fused ops are rounded once, at the end, as in Inductor.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.passes.loops.queries import defining, walk


@dataclass(frozen=True)
class KeepWide:
    """Drop pairs of arith.truncf to bf16 or f16 and arith.extf that lead back to the same type."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "arith.extf"):
            rounding, type_ = defining(op.operands[0]), op.operands[0].type
            narrow = ir.ShapedType(type_).element_type if isinstance(type_, ir.ShapedType) else type_
            if rounding is None or rounding.name != "arith.truncf" or not isinstance(narrow, ir.BF16Type | ir.F16Type):
                continue
            if rounding.operands[0].type == op.results[0].type:
                op.results[0].replace_all_uses_with(rounding.operands[0])
                op.erase()
