"""multiply-tall: turns the product of two dense matrices, a tall one and a small one, into a `kernel.tall_product`.

before   %y = linalg.generic {indexing_maps = [(i, j, k) -> (i, k), (i, j, k) -> (k, j), (i, j, k) -> (i, j)]}
           ins(%x, %w : tensor<?x?xf32>, tensor<?x?xf32>) outs(%zeros : tensor<?x?xf32>) { mulf, addf }
after    %y = "kernel.tall_product"(%x, %w) {lanes = 16 : i64, vectors = 4 : i64}

This is for the features of a graph's nodes times the weight of a layer. Any other op in the region is an error.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import affine_maps, integer
from gossamer.dialects.open_ops import TallProductOp
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.queries import all_ops, dims, filled_with, iterator_types, walk
from gossamer.passes.loops.vectors import byte_width

_BODY = ["arith.mulf", "arith.addf", "linalg.yield"]


@dataclass(frozen=True)
class MultiplyTall:
    """`bits` is the width of the target's vectors."""

    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            if "reduction" in iterator_types(op):
                self._schedule(op)
        for op in reversed(all_ops(module.operation)):
            if op.name in ("linalg.generic", "tensor.empty") and not any(list(r.uses) for r in op.results):
                op.erase()
            elif op.name.startswith("linalg.") and op.name != "linalg.yield":
                raise CompileError(f"the tall schedule has no way to compute {op.name} at {op.location}")

    def _schedule(self, op: ir.Operation) -> None:
        if not _is_product(op):
            raise CompileError(f"the tall schedule computes dense x dense in f32 or f64, not {op.name} at {op.location}")
        x, w, _ = op.operands
        lanes = self.bits // (byte_width(ir.RankedTensorType(x.type).element_type) * 8)
        vectors = registers(self.bits) // 8  # the sums of a few rows, each of so many vectors, fit into registers
        with ir.InsertionPoint(op), op.location:
            scheduled = TallProductOp(x, w, integer(lanes), integer(vectors), result=op.results[0].type)
        op.results[0].replace_all_uses_with(scheduled.result)


def _is_product(op: ir.Operation) -> bool:
    """Whether this is y[i, j] = sum_k x[i, k] w[k, j] of dense matrices."""
    if len(op.operands) != 3 or filled_with(op.operands[2]) != 0 or iterator_types(op).count("reduction") != 1:
        return False
    types = [ir.RankedTensorType(value.type) for value in op.operands]
    element = types[0].element_type
    if not isinstance(element, ir.F32Type | ir.F64Type):
        return False
    if any(t.rank != 2 or t.encoding is not None or t.element_type != element for t in types):
        return False
    of_x, of_w, of_y = (dims(m) for m in affine_maps(op.attributes["indexing_maps"]))
    if [of_x[0], of_w[1]] != of_y or of_x[1] != of_w[0]:
        return False
    block = op.regions[0].blocks[0]
    *_, product, total, _ = inner = [each.operation for each in block.operations]
    if [each.name for each in inner] != _BODY:
        return False
    x, w, y = block.arguments
    return set(product.operands) == {x, w} and set(total.operands) == {y, product.results[0]}
