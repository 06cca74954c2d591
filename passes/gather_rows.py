"""gather-rows: the product of a CSR matrix of any size with a dense one becomes a `kernel.gather_rows`.

before   %y = linalg.generic {indexing_maps = [(i, n, k) -> (i, k), (i, n, k) -> (k, n), (i, n, k) -> (i, n)]}
           ins(%a, %x : tensor<?x?xf32, #CSR>, tensor<?x?xf32>) outs(%zeros : tensor<?x?xf32>) { mulf, addf }
after    %y = "kernel.gather_rows"(%a, %x) {lanes = 16 : i64, vectors = 16 : i64}

For matrices that come with each call, such as the adjacency of a graph. Whatever else is in the region is an error: the caller
compiles it with the reference pipeline.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import GatherRowsOp, affine_maps
from gossamer.passes.queries import all_ops, dims, filled_with, iterator_types, sole_user, walk
from gossamer.passes.scalars import Scalars
from gossamer.passes.vectors import byte_width

_VECTORS = 16  # sums in registers, half of those of AVX-512: 256 columns of f32 in one pass over the entries
_NARROWING = ["arith.truncf", "linalg.yield"]


@dataclass(frozen=True)
class GatherRows:
    """`bits` is the width of the target's vectors."""

    name: ClassVar[str] = "gather-rows"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            if "reduction" in iterator_types(op):
                self._schedule(op)
        for op in reversed(all_ops(module.operation)):
            if op.name in ("linalg.generic", "tensor.empty") and not any(list(r.uses) for r in op.results):
                op.erase()
            elif op.name.startswith("linalg.") and op.name != "linalg.yield":
                raise CompileError(f"the rows schedule has no way to compute {op.name} at {op.location}")

    def _schedule(self, op: ir.Operation) -> None:
        if not _is_product(op):
            raise CompileError(f"the rows schedule computes CSR x dense, not {op.name} at {op.location}")
        a, x, _ = op.operands
        scalars = Scalars(ir.RankedTensorType(x.type).element_type)
        lanes = self.bits // (byte_width(scalars.wide) * 8)
        vectors = _VECTORS if self.bits >= 512 else _VECTORS // 2
        result = _narrowed(op.results[0]) if scalars.wide != scalars.element else op.results[0]
        with ir.InsertionPoint(op), op.location:
            scheduled = GatherRowsOp(a, x, _i64(lanes), _i64(vectors), result=result.type)
        result.replace_all_uses_with(scheduled.result)


def _narrowed(sums: ir.Value) -> ir.Value:
    """Wide sums, as elements of the result."""
    user = sole_user(sums)
    if user is None or user.name != "linalg.generic" or _body(user) != _NARROWING:
        raise CompileError("the rows schedule computes wide sums for a narrow result only")
    return user.results[0]


def _is_product(op: ir.Operation) -> bool:
    """Whether this is y[i, n] = sum_k a[i, k] x[k, n], or y[i] = sum_k a[i, k] x[k], with a in CSR."""
    if len(op.operands) != 3 or filled_with(op.operands[2]) != 0:
        return False
    a, x, y = (ir.RankedTensorType(value.type) for value in op.operands)
    if a.encoding is None or x.encoding is not None or y.encoding is not None or a.element_type != x.element_type:
        return False
    if Format.parse(str(a.encoding)).levels != Format.CSR.levels or x.rank not in (1, 2) or y.rank != x.rank:
        return False
    of_a, of_x, of_y = (dims(m) for m in affine_maps(op.attributes["indexing_maps"]))
    if [of_a[0], *of_x[1:]] != of_y or of_a[1] != of_x[0] or iterator_types(op).count("reduction") != 1:
        return False
    scalars = Scalars(x.element_type)
    if y.element_type != scalars.wide:
        return False
    kind = "f" if scalars.floating else "i"
    widening = [] if scalars.wide == scalars.element else ["arith.extf"] * 2
    if _body(op) != [*widening, f"arith.mul{kind}", f"arith.add{kind}", "linalg.yield"]:
        return False
    block = op.regions[0].blocks[0]
    *wide, product, total, _ = [inner.operation for inner in block.operations]
    factors = {each.results[0] for each in wide} or set(block.arguments[:2])
    read = {each.operands[0] for each in wide} or factors
    multiplied, added = set(product.operands), set(total.operands)
    return read == set(block.arguments[:2]) and multiplied == factors and added == {block.arguments[2], product.results[0]}


def _body(op: ir.Operation) -> list[str]:
    return [inner.operation.name for inner in op.regions[0].blocks[0].operations]


def _i64(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
