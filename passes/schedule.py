"""schedule: decides how each `kernel.contract` is computed and writes it down as a scheduled op.

before   %y = "kernel.contract"(%x, %w) ({epilogue}) {indexing_maps = [(t, m, k) -> (t, k), (t, m, k) -> (m, k)]}
after    %y = "kernel.spmm"(%x, %w) ({epilogue}) {lanes = 16 : i64, reduction = 1 : i64, tile = [64, 1024, 192]}
   or    %y = "kernel.spmv"(%x, %w) ({epilogue}) {lanes = 16 : i64, reduction = 1 : i64, tokens = 4 : i64}

The weight's format, which choose-format has given it, says which: K-blocked is for spmm, rows are for spmv. A contraction
without a schedule is an error, and so is linalg that is no part of one: the caller leaves such a region dense, or compiles
it with the reference pipeline.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import SpmmOp, SpmvOp, affine_maps
from gossamer.passes.choose_format import by_rows, is_linear, k_blocked
from gossamer.passes.queries import all_ops, dims, walk

_VECTORS = 4  # vectors of tokens in a register tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache
_TOKENS = 4  # tokens that share the loads of a row


@dataclass(frozen=True)
class Schedule:
    """`bits` is the width of the target's vectors."""

    name: ClassVar[str] = "schedule"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for contract in walk(module, "kernel.contract"):
            self._schedule(contract.opview)
        for op in all_ops(module.operation):
            if op.name.startswith("linalg."):
                raise CompileError(f"no schedule for {op.name} at {op.location}: it is not fused into a contraction")

    def _schedule(self, contract: Any) -> None:
        if not is_linear(contract):
            raise CompileError(f"no schedule for {contract.operation.name} of {contract.lhs.type} and {contract.rhs.type}")
        _check_elements(contract)
        reduction = dims(affine_maps(contract.indexing_maps)[1]).index(2)
        lanes = self.bits // ir.FloatType(contract.epilogue.blocks[0].arguments[0].type).width
        x, w, type_ = contract.lhs, contract.rhs, contract.result.type
        weight = ir.RankedTensorType(w.type)
        stored = Format.parse(str(weight.encoding))
        block = stored.levels[0].block
        with ir.InsertionPoint(contract), contract.location:
            if block > 1 and stored == k_blocked(block, reduction):
                tile = ir.ArrayAttr.get([_i64(n) for n in (_VECTORS * lanes, _ROWS, block)])
                scheduled: Any = SpmmOp(x, w, tile, _i64(lanes), _i64(reduction), result=type_)
            elif stored == by_rows(weight.shape[reduction], reduction):
                scheduled = SpmvOp(x, w, _i64(_TOKENS), _i64(lanes), _i64(reduction), result=type_)
            else:
                raise CompileError(f"no schedule for a weight stored as {stored.name}")
        contract.epilogue.blocks[0].append_to(scheduled.epilogue)
        contract.result.replace_all_uses_with(scheduled.result)
        contract.operation.erase()


def _check_elements(contract: Any) -> None:
    """CompileError unless the result and what the epilogue reads are floats that lie in memory in the order of the result."""
    elements = [ir.RankedTensorType(contract.result.type).element_type]
    for read in contract.epilogue.blocks[0].operations:
        if read.operation.name == "kernel.read":
            affine_map = ir.AffineMapAttr(read.map).value
            elements.append(read.result.type)
            if any(d is None and str(e) != "0" for d, e in zip(dims(affine_map), affine_map.results, strict=True)):
                raise CompileError(f"no schedule for an epilogue that reads by {affine_map}")
            positions = [d for d in dims(affine_map) if d is not None]
            if positions != sorted(set(positions)):
                raise CompileError(f"no schedule for an epilogue that reads by {affine_map}, which is not in order")
    for element in elements:
        if not isinstance(element, ir.FloatType):
            raise CompileError(f"no schedule for elements of type {element}")


def _i64(value: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
