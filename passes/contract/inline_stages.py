"""inline-stages: inlines the stages of a chain, which are private functions until each is fused by itself.

before   func.func private @stage0(%x, %w) { %0 = "kernel.contract"(%x, %w) ... }
         func.func @region(%x, %w0, %w1) { %0 = call @stage0(%x, %w0)   %1 = call @stage1(%0, %w1)   return %1 }
after    func.func @region(%x, %w0, %w1) { %0 = "kernel.contract"(%x, %w0) ...   %1 = "kernel.contract"(%0, %w1) ... }

MLIR's own inliner asks the dialect for permission, which a dialect that is defined in Python cannot give.
"""

from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import func

from gossamer.passes.loops.queries import all_ops, public_functions


@dataclass(frozen=True)
class InlineStages:
    """Replace calls of private functions by their bodies, and drop these functions."""

    def run(self, module: ir.Module) -> None:
        functions = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
        stages = {f.name.value: f for f in functions if "sym_visibility" in f.attributes and not f.is_external}
        for function in public_functions(module):
            for op in [o.operation for o in function.entry_block.operations]:
                if op.name == "func.call" and (callee := ir.FlatSymbolRefAttr(op.attributes["callee"]).value) in stages:
                    _inline(op, stages[callee].entry_block)
        for stage in stages.values():
            stage.operation.erase()


def _inline(call: ir.Operation, body: ir.Block) -> None:
    """Puts clones of the body's ops before the call, and replaces the call's results by the values that they return."""
    mapping = dict(zip(body.arguments, call.operands, strict=True))
    *ops, returned = [o.operation for o in body.operations]
    for op in ops:
        clone = op.clone(ir.InsertionPoint(call)).operation
        for inner in all_ops(clone):
            for position, operand in enumerate(inner.operands):
                if operand in mapping:
                    inner.operands[position] = mapping[operand]
        mapping.update(zip(op.results, clone.results, strict=True))
    for result, value in zip(call.results, returned.operands, strict=True):
        result.replace_all_uses_with(mapping.get(value, value))
    call.erase()
