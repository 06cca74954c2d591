"""keep-wide: removes a rounding to a narrow float that is widened again at once.

before   %1 = arith.truncf %0 : f32 to bf16
         %2 = arith.extf %1 : bf16 to f32
         %3 = math.erf %2 : f32
after    %3 = math.erf %0 : f32

Eager torch rounds after every op because results go through memory. Fused ops are rounded once, at the end, as in Inductor.

It also keeps all digits of a number that is added or multiplied, as eager torch does. A bound stays rounded.

before   %1 = arith.truncf %cst : f64 to f16    // 1e5, which is infinite in f16
         %2 = arith.extf %1 : f16 to f32
         %3 = arith.mulf %0, %2 : f32
after    %2 = arith.truncf %cst : f64 to f32
         %3 = arith.mulf %0, %2 : f32
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith

from gossamer.passes.loops.queries import defining, walk

_ARITHMETIC = {"arith.addf", "arith.subf", "arith.mulf", "arith.divf"}


@dataclass(frozen=True)
class KeepWide:
    """Drop pairs of arith.truncf to bf16 or f16 and arith.extf that lead back to the same type, or that round a number."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "arith.extf"):
            rounding, type_ = defining(op.operands[0]), op.operands[0].type
            narrow = ir.ShapedType(type_).element_type if isinstance(type_, ir.ShapedType) else type_
            if rounding is None or rounding.name != "arith.truncf" or not isinstance(narrow, ir.BF16Type | ir.F16Type):
                continue
            source, (result,) = rounding.operands[0], op.results
            if source.type != result.type and _is_number_in_arithmetic(source, result):
                with ir.InsertionPoint(op), op.location:
                    source = arith.truncf(result.type, source)
            if source.type == result.type:
                result.replace_all_uses_with(source)
                op.erase()


def _is_number_in_arithmetic(source: ir.Value, result: ir.Value) -> bool:
    """Whether a source is a number in f64, and only arithmetic in f32 uses the result of its rounding."""
    made = defining(source)
    if made is None or made.name != "arith.constant" or not isinstance(source.type, ir.F64Type):
        return False
    return isinstance(result.type, ir.F32Type) and all(use.owner.operation.name in _ARITHMETIC for use in result.uses)
