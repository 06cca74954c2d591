"""keep-nan: a bound that a comparison chooses lets a NaN through, as clamp and its kin do in torch.

before   %1 = arith.cmpf ult, %x, %bound : f32        // true of a NaN
         %2 = arith.select %1, %bound, %x : f32
after    %2 = arith.maximumf %x, %bound : f32

torch-mlir spells clamp, relu6 and hardtanh this way. Ordered comparisons are those of users (`where(x < 0, 0, x)`): they mean
what they say.
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
