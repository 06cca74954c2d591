"""schedule: decides how each `kernel.contract` is computed and writes it down as a scheduled op.

before   %y = "kernel.contract"(%x, %w) ({epilogue}) {indexing_maps = [(t, m, k) -> (t, k), (t, m, k) -> (m, k)]}
after    %y = "kernel.spmm"(%x, %w) ({epilogue}) {lanes = 16 : i64, reduction = 1 : i64, tile = [64, 1024, 192]}

Takes products with a K-blocked weight (see choose-format). A contraction without a schedule is an error: the caller then
compiles the region with the reference pipeline.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import SpmmOp, affine_maps
from gossamer.passes.choose_format import is_linear, k_blocked
from gossamer.passes.queries import dims, walk

_VECTORS = 4  # vectors of tokens in a register tile
_ROWS = 1024  # rows of the weight whose sums stay in the second-level cache


@dataclass(frozen=True)
class Schedule:
    """`bits` is the width of the target's vectors."""

    name: ClassVar[str] = "schedule"
    bits: int = 512

    def run(self, module: ir.Module) -> None:
        for contract in walk(module, "kernel.contract"):
            self._schedule(contract.opview)

    def _schedule(self, contract: Any) -> None:
        columns = _block_width(contract)
        reduction = dims(affine_maps(contract.indexing_maps)[1]).index(2)
        total = contract.epilogue.blocks[0].arguments[0].type
        lanes = self.bits // ir.FloatType(total).width
        i64 = ir.IntegerType.get_signless(64)
        tile = [ir.IntegerAttr.get(i64, n) for n in (_VECTORS * lanes, _ROWS, columns)]
        with ir.InsertionPoint(contract), contract.location:
            spmm = SpmmOp(
                contract.lhs,
                contract.rhs,
                ir.ArrayAttr.get(tile),
                ir.IntegerAttr.get(i64, lanes),
                ir.IntegerAttr.get(i64, reduction),
                result=contract.result.type,
            )
        contract.epilogue.blocks[0].append_to(spmm.epilogue)
        contract.result.replace_all_uses_with(spmm.result)
        contract.operation.erase()


def _block_width(contract: Any) -> int:
    """The width of the weight's blocks of K; CompileError if the contraction has no schedule."""
    if is_linear(contract):
        encoding = str(ir.RankedTensorType(contract.rhs.type).encoding)
        fmt = Format.parse(encoding)
        reduction = dims(affine_maps(contract.indexing_maps)[1]).index(2)
        if len(fmt.levels) == 3 and (block := fmt.levels[0].block) > 1 and fmt == k_blocked(block, reduction):
            return block
    raise CompileError(f"no schedule for {contract.operation.name} of {contract.lhs.type} and {contract.rhs.type}")
