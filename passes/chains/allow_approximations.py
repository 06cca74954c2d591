"""allow-approximations: marks the ops of a chain of int8 whose results may be approximate.

before   %y = "kernel.spmm"(%x, %w) ({ ... arith.addf %a, %b ... math.erf %u : f32 ... })
         %max = "kernel.max"() ({ ... "kernel.read"(%y) ... })
         %q = "kernel.map"() ({ ... "kernel.read"(%y) ... arith.fptosi ... to i8 })
after    the same with arith.addf %a, %b fastmath<contract> and math.erf %u fastmath<afn>

A function whose results are rounded to 8 bits at once may be approximate. Rounding moves a value by up to a 254th of the
greatest one, which is much more than the errors of the approximations (see expand-math). In the epilogue of sums of integers,
one instruction may multiply and add.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.passes.codegen.float_vectors import number
from gossamer.passes.loops.queries import all_ops, defining, walk

_APPROXIMATE, _FUSED = "#arith.fastmath<afn>", "#arith.fastmath<contract>"


@dataclass(frozen=True)
class AllowApproximations:
    """Mark each `math.erf` in a product or a map whose result only gives bytes and their scale, and each multiplication and
    addition in the epilogue of sums of integers."""

    def run(self, module: ir.Module) -> None:
        for op in [*walk(module, "kernel.spmm"), *walk(module, "kernel.map")]:
            allowed = dict.fromkeys(["arith.mulf", "arith.addf"], _FUSED) if _sums_integers(op) else {}
            if all(_becomes_bytes(use.owner.operation) for use in op.results[0].uses):
                allowed["math.erf"] = _APPROXIMATE
            for inner in all_ops(op):
                if inner.name in allowed:
                    inner.attributes["fastmath"] = ir.Attribute.parse(allowed[inner.name])


def _sums_integers(op: ir.Operation) -> bool:
    return op.name == "kernel.spmm" and isinstance(op.regions[0].blocks[0].arguments[0].type, ir.IntegerType)


def _becomes_bytes(user: ir.Operation) -> bool:
    """Whether a user of a tensor turns it into bytes, or computes from it what these need: the greatest value, for their scale,
    or a sum of zeros times it, which is NaN if it has one."""
    reader = user.parent
    if user.name != "kernel.read" or reader is None:
        return False
    op = reader.operation
    if op.name == "kernel.sum":
        *_, end = op.regions[0].blocks[0].operations
        summed = defining(end.operands[0])
        return summed is not None and summed.name == "arith.mulf" and any(number(factor) == 0.0 for factor in summed.operands)
    element = ir.RankedTensorType(op.results[0].type).element_type
    return op.name == "kernel.max" or (op.name == "kernel.map" and str(element) == "i8")
