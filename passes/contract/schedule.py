"""schedule: decides how each `kernel.contract` is computed and writes it down as a scheduled op.

before   %y = "kernel.contract"(%x, %w) ({epilogue}) {indexing_maps = [(t, m, k) -> (t, k), (t, m, k) -> (m, k)]}
after    %y = "kernel.spmm"(%x, %w) ({epilogue}) {schedule = "broadcast", tile = [32], lanes = 16, reduction = 1}

choose-format has stored the weight for the same schedule, or for the one in the product's attribute. A contraction that the
schedule cannot compute is an error, and so is a linalg op outside of contractions. The caller then leaves the region dense, or
compiles it with the reference pipeline.
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.dialects.kernel import integer, product
from gossamer.passes.contract.choose_format import SCHEDULE, is_linear, matrix_of
from gossamer.passes.framework.pass_options import choices
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.epilogue import check_elements
from gossamer.passes.loops.queries import all_ops, walk
from gossamer.passes.schedules.families import ALL_FAMILIES


@dataclass(frozen=True)
class Schedule:
    """`schedule` names a family, `bits` is the width of the target's vectors, `features` has its further instructions."""

    schedule: str = "broadcast"
    bits: int = 512
    features: str = ""

    def __post_init__(self) -> None:
        if self.schedule not in ALL_FAMILIES:
            raise OptionError(f"no schedule is called {self.schedule!r}{choices(self.schedule, ALL_FAMILIES)}")

    def run(self, module: ir.Module) -> None:
        for contract in walk(module, "kernel.contract"):
            self._schedule(contract.opview)
        for op in all_ops(module.operation):
            if op.name.startswith("linalg."):
                raise CompileError(f"no schedule for {op.name} at {op.location}: it is not fused into a contraction")

    def _schedule(self, contract: Any) -> None:
        if not is_linear(contract):
            raise CompileError(f"no schedule for {contract.operation.name} of {contract.lhs.type} and {contract.rhs.type}")
        check_elements(contract)
        matrix = matrix_of(contract, self.bits, self.features)
        stored = storage_of_type(ir.RankedTensorType(contract.rhs.type))
        assert stored is not None, "a linear contraction has a sparse weight"
        noted = contract.operation.attributes
        schedule = ir.StringAttr(noted[SCHEDULE]).value if SCHEDULE in noted else self.schedule
        tile = ALL_FAMILIES[schedule].tile(matrix, stored)
        if tile is None:
            raise CompileError(f"no {schedule} schedule for a weight stored as {stored.name}")
        with ir.InsertionPoint(contract), contract.location:
            how = {
                "schedule": ir.StringAttr.get(schedule),
                "tile": ir.ArrayAttr.get([integer(n) for n in tile]),
                "lanes": integer(matrix.lanes),
                "reduction": integer(matrix.reduction),
            }
            results = contract.operation.results
            scheduled = product("spmm", [contract.lhs, contract.rhs], how, [value.type for value in results])
        contract.epilogue.blocks[0].append_to(scheduled.epilogue)
        for value, result in zip(results, scheduled.operation.results, strict=True):
            value.replace_all_uses_with(result)
        contract.operation.erase()
