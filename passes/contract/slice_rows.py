"""slice-rows: stores the matrix of a `kernel.gather_rows` of a vector as `Slices`, for a matrix that several calls use.

before   %y = "kernel.gather_rows"(%a, %x) ({yield %sum}) {lanes = 16, ...} : (tensor<?x?xf32, #CSR>, tensor<?xf32>) -> ...
after    %y = "kernel.gather_slices"(%a, %x) {gathers = 0}
           : (tensor<?x?xf32, "slices(reduction=1, lanes=16, width=32)">, tensor<?xf32>) -> ...

An epilogue, or anything else than a matrix of floats times a vector, is an error. The caller then keeps the matrix in CSR.
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from gossamer.dialects.elements import WIDE
from gossamer.dialects.errors import CompileError
from gossamer.dialects.kernel import integer
from gossamer.dialects.open_ops import GatherSlicesOp
from gossamer.dialects.packing import Slices
from gossamer.passes.loops.encodings import stored_as
from gossamer.passes.loops.queries import public_functions, walk


@dataclass(frozen=True)
class SliceRows:
    """Changes every kernel.gather_rows of the module.

    width    bits of a coordinate, 16 or 32
    gathers  whether the target's gather instructions are faster than single loads
    """

    width: int = 32
    gathers: bool = False

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.gather_rows"):
            _change(op.opview, self.width, self.gathers)
        for function in public_functions(module):
            inputs = [a.type for a in function.entry_block.arguments]
            function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, function.type.results))


def _change(op: Any, width: int, gathers: bool) -> None:
    a, x = ir.RankedTensorType(op.a.type), ir.RankedTensorType(op.x.type)
    if len(op.epilogue.blocks[0].operations) > 1:
        raise CompileError(f"the slices schedule has no epilogue, but {op.operation.name} at {op.location} has one")
    if x.rank != 1 or str(a.element_type) not in WIDE or not isinstance(op.a.owner, ir.Block):
        raise CompileError(f"the slices schedule computes a matrix of floats times a vector, not {op.operation.name} of {x}")
    op.a.set_type(stored_as(a, Slices(1, ir.IntegerAttr(op.lanes).value, width)))
    with ir.InsertionPoint(op), op.location:
        sliced = GatherSlicesOp(op.a, op.x, integer(gathers), result=op.result.type)
    op.result.replace_all_uses_with(sliced.result)
    op.operation.erase()
