"""multiply-rows: turns the product of two CSR matrices into a third one into a `kernel.multiply_rows` (SpGEMM).

before   %c = linalg.generic {indexing_maps = [(i, j, k) -> (i, k), (i, j, k) -> (k, j), (i, j, k) -> (i, j)]}
           ins(%a, %b : tensor<?x?xf32, #CSR>, tensor<?x?xf32, #CSR>) outs(%empty : tensor<?x?xf32, #CSR>) { mulf, addf }
after    %c = "kernel.multiply_rows"(%a, %b)

Works in f32 and f64. Any other op in the region is an error, and the caller compiles the region with the reference pipeline.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.elements import WIDE
from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import affine_maps
from gossamer.dialects.open_ops import MultiplyRowsOp
from gossamer.passes.loops.queries import all_ops, defining, dims, walk


@dataclass(frozen=True)
class MultiplyRows:
    """Schedule the product of the module."""

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "linalg.generic"):
            if not _is_product(op):
                raise CompileError(
                    f"the gustavson schedule computes CSR x CSR to CSR in f32 or f64, not {op.name} at {op.location}"
                )
            a, b, empty = op.operands
            with ir.InsertionPoint(op), op.location:
                scheduled = MultiplyRowsOp(a, b, result=op.results[0].type)
            op.results[0].replace_all_uses_with(scheduled.result)
            op.erase()
            made = defining(empty)
            assert made is not None
            made.erase()
        for op in reversed(all_ops(module.operation)):
            if op.name == "tensor.dim" and not any(list(r.uses) for r in op.results):
                op.erase()
            elif op.name.startswith(("linalg.", "kernel.")) and op.name != "kernel.multiply_rows":
                raise CompileError(f"the gustavson schedule has no way to compute {op.name} at {op.location}")


def _is_product(op: ir.Operation) -> bool:
    """Whether this is c[i, j] = sum_k a[i, k] b[k, j] of matrices in CSR, from an empty c."""
    if len(op.operands) != 3 or (made := defining(op.operands[2])) is None or made.name != "tensor.empty":
        return False
    types = [ir.RankedTensorType(value.type) for value in op.operands]
    if any(t.encoding is None or Format.parse(str(t.encoding)).levels != Format.CSR.levels for t in types):
        return False
    if len({str(t.element_type) for t in types}) > 1 or str(types[0].element_type) not in WIDE:
        return False
    of_a, of_b, of_c = (dims(m) for m in affine_maps(op.attributes["indexing_maps"]))
    if [of_a[0], of_b[1]] != of_c or of_a[1] != of_b[0] or of_a[1] in of_c:
        return False
    block = op.regions[0].blocks[0]
    body = [inner.operation for inner in block.operations]
    if [inner.name for inner in body] != ["arith.mulf", "arith.addf", "linalg.yield"]:
        return False
    multiplied, added = set(body[0].operands), set(body[1].operands)
    return multiplied == set(block.arguments[:2]) and added == {block.arguments[2], body[0].results[0]}
