"""gather-rows: the product of a CSR matrix of any size with a dense one becomes a `kernel.gather_rows`.

before   %y = linalg.generic {indexing_maps = [(i, n, k) -> (i, k), (i, n, k) -> (k, n), (i, n, k) -> (i, n)]}
           ins(%a, %x : tensor<?x?xf32, #CSR>, tensor<?x?xf32>) outs(%zeros : tensor<?x?xf32>) { mulf, addf }
after    %y = "kernel.gather_rows"(%a, %x) {lanes = 16 : i64, vectors = 8 : i64}

For matrices that come with each call, such as the adjacency of a graph. Whatever else is in the region is an error: the caller
compiles it with the reference pipeline.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import GatherRowsOp, affine_maps
from gossamer.passes.queries import all_ops, dims, filled_with, iterator_types, walk

_VECTORS = 8  # sums in registers, enough to hide the latency of two multiply-adds a cycle


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
            raise CompileError(f"the rows schedule computes CSR x dense in f32 or f64, not {op.name} at {op.location}")
        a, x, _ = op.operands
        element = ir.RankedTensorType(x.type).element_type
        lanes = self.bits // ir.FloatType(element).width
        with ir.InsertionPoint(op), op.location:
            scheduled = GatherRowsOp(a, x, _i64(lanes), _i64(_VECTORS), result=op.results[0].type)
        op.results[0].replace_all_uses_with(scheduled.result)


def _is_product(op: ir.Operation) -> bool:
    """Whether this is y[i, n] = sum_k a[i, k] x[k, n] with a in CSR, in f32 or f64."""
    if len(op.operands) != 3 or filled_with(op.operands[2]) != 0:
        return False
    a, x, y = (ir.RankedTensorType(value.type) for value in op.operands)
    if a.encoding is None or x.encoding is not None or y.encoding is not None or str(x.element_type) not in ("f32", "f64"):
        return False
    if Format.parse(str(a.encoding)).levels != Format.CSR.levels or x.rank != 2 or y.rank != 2:
        return False
    of_a, of_x, of_y = (dims(m) for m in affine_maps(op.attributes["indexing_maps"]))
    if [of_a[0], of_x[1]] != of_y or of_a[1] != of_x[0] or iterator_types(op).count("reduction") != 1:
        return False
    block = op.regions[0].blocks[0]
    body = [inner.operation for inner in block.operations]
    if [inner.name for inner in body] != ["arith.mulf", "arith.addf", "linalg.yield"]:
        return False
    multiplied, added = set(body[0].operands), set(body[1].operands)
    return multiplied == set(block.arguments[:2]) and added == {block.arguments[2], body[0].results[0]}


def _i64(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
