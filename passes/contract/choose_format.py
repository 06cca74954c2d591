"""choose-format: gives each sparse weight of a product the encoding that its schedule wants.

before   func.func @region(%x: ..., %w: tensor<3072x768xf32, #CSR> {kernel.density = 0.1 : f64})
after    func.func @region(%x: ..., %w: tensor<3072x768xf32, "padded(reduction=1, columns=384)">)

Each family of schedules chooses its own encoding (`Family.storage`). The choice depends only on the weight's shape and on its
hints, which the importer rounds. The pass then drops the hints, so that layers of one shape share one kernel. If the hints of a
weight name a schedule, the weight is stored for that one, and an attribute of the product tells the pass `schedule` so.
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.dialects.kernel import affine_maps
from gossamer.passes.contract.forget_hints import ForgetHints
from gossamer.passes.contract.hints import hints_of, schedule_of
from gossamer.passes.framework.family import Matrix
from gossamer.passes.framework.pass_options import choices
from gossamer.passes.loops.encodings import stored_as
from gossamer.passes.loops.queries import dims, public_functions, walk
from gossamer.passes.schedules.families import ALL_FAMILIES

SCHEDULE = "schedule"
"""Attribute of a kernel.contract: the schedule for which its weight is stored, if the hints named one."""


@dataclass(frozen=True)
class ChooseFormat:
    """Gives each weight its encoding.

    schedule  name of a family
    bits      width of the target's vectors
    features  further instructions of the target, such as `amx+avx512bf16`
    l1d       bytes of its first-level data cache
    chain     whether the function is to run as a chain
    """

    schedule: str = "broadcast"
    bits: int = 512
    features: str = ""
    l1d: int = 32 << 10
    chain: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in ALL_FAMILIES:
            raise OptionError(f"no schedule is called {self.schedule!r}{choices(self.schedule, ALL_FAMILIES)}")

    def run(self, module: ir.Module) -> None:
        for contract in walk(module, "kernel.contract"):
            self._choose(contract.opview)
        for function in public_functions(module):
            inputs = [a.type for a in function.entry_block.arguments]
            function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, function.type.results))
        ForgetHints().run(module)

    def _choose(self, contract: Any) -> None:
        weight = contract.rhs
        if not isinstance(weight.owner, ir.Block) or not is_linear(contract):
            return
        argument = weight.owner.owner.opview, ir.BlockArgument(weight).arg_number
        matrix = matrix_of(contract, self.bits, self.features, l1d=self.l1d, **hints_of(*argument))
        own = schedule_of(*argument)
        if own is not None:
            contract.operation.attributes[SCHEDULE] = ir.StringAttr.get(own)
        schedule = own or self.schedule
        family = ALL_FAMILIES.get(schedule)
        chosen = family.stores(matrix, self.chain) if family is not None else None
        if chosen is None:
            raise CompileError(f"no {schedule} schedule for a weight of type {weight.type}")
        weight.set_type(stored_as(ir.RankedTensorType(weight.type), chosen))


def is_linear(contract: Any) -> bool:
    """Whether a kernel.contract is y[t, m] = sum_k x[t, k] w[m, k] with a sparse weight, stored as [M, K] or [K, M]."""
    maps = affine_maps(contract.indexing_maps)
    x_dims, w_dims = (dims(m) for m in maps)
    x, w = (ir.RankedTensorType(v.type) for v in (contract.lhs, contract.rhs))
    if x_dims != [0, 2] or w_dims not in ([1, 2], [2, 1]):
        return False
    return x.encoding is None and w.encoding is not None and w.has_static_shape and not x.is_dynamic_dim(1)


def matrix_of(contract: Any, bits: int, features: str, **hints: Any) -> Matrix:
    """Returns the weight of a linear kernel.contract as a `Matrix`. `hints` has the fields that shape and type do not give."""
    weight = ir.RankedTensorType(contract.rhs.type)
    reduction = dims(affine_maps(contract.indexing_maps)[1]).index(2)
    rows, columns = weight.shape[1 - reduction], weight.shape[reduction]
    known = frozenset(filter(None, features.split("+")))
    return Matrix(rows, columns, reduction, str(weight.element_type), bits, features=known, **hints)
