"""keep-nan: turns a bound written as a comparison into a minimum or maximum that keeps NaN, as torch's clamp does.

before   %1 = arith.cmpf ult, %x, %bound : f32        // true of a NaN
         %2 = arith.select %1, %bound, %x : f32
after    %2 = arith.maximumf %x, %bound : f32

torch-mlir lowers clamp, relu6 and hardtanh to the first form, with unordered comparisons. Ordered comparisons come from users
(`where(x < 0, 0, x)`), so they stay.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import arith

from gossamer.passes.loops.queries import defining, walk

_BOUNDS = {
    arith.CmpFPredicate.ULT: arith.MaximumFOp,
    arith.CmpFPredicate.ULE: arith.MaximumFOp,
    arith.CmpFPredicate.UGT: arith.MinimumFOp,
    arith.CmpFPredicate.UGE: arith.MinimumFOp,
}


@dataclass(frozen=True)
class KeepNan:
    """Replace select(x < bound, bound, x) by a maximum, and select(x > bound, bound, x) by a minimum."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "arith.select"):
            condition, chosen, other = op.operands
            compared = defining(condition)
            if compared is None or compared.name != "arith.cmpf" or list(compared.operands) != [other, chosen]:
                continue
            bound = _BOUNDS.get(arith.CmpFPredicate(ir.IntegerAttr(compared.attributes["predicate"]).value))
            if bound is not None:
                with ir.InsertionPoint(op), op.location:
                    op.results[0].replace_all_uses_with(bound(other, chosen).result)
                op.erase()
