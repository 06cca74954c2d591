"""gather-rows: turns the product of a CSR matrix of any size with a dense one into a `kernel.gather_rows` with its epilogue.

before   %y = "kernel.contract"(%a, %x) ({ ^bb0(%sum: f32): max(%sum + kernel.read(%bias), 0) })
           {indexing_maps = [(i, n, k) -> (i, k), (i, n, k) -> (k, n)]} : (tensor<?x?xf32, #CSR>, tensor<?x?xf32>) -> ...
after    %y = "kernel.gather_rows"(%a, %x) ({ ^bb0(%sum: f32): max(%sum + kernel.read(%bias), 0) })
           {lanes = 16 : i64, vectors = 16 : i64, ahead = 1 : i64, gathers = 0 : i64}

This is for matrices that are arguments of each call, such as the adjacency matrix of a graph. Runs after fuse-epilogue. If the
region has any other op, this is an error, and the caller compiles the region with the reference pipeline.
"""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import affine_maps, integer
from gossamer.dialects.open_ops import GatherRowsOp
from gossamer.passes.framework.registers import registers
from gossamer.passes.loops.epilogue import check_elements
from gossamer.passes.loops.queries import all_ops, dims, walk
from gossamer.passes.loops.scalars import Scalars
from gossamer.passes.loops.vectors import byte_width

_VECTORS = {16: 13, 32: 16}  # of sums, by registers. So AVX2 reads 104 columns of f32 in one pass over the entries, AVX-512 256
_LARGE = 32 << 10  # bytes of a first-level cache. Rows of x are fetched ahead into it only if it is larger.


@dataclass(frozen=True)
class GatherRows:
    """Its options describe the target.

    bits     the width of vectors
    l1d      the bytes of the first-level data cache
    gathers  whether gather instructions are faster than single loads
    """

    bits: int = 512
    l1d: int = 32 << 10
    gathers: bool = False

    def run(self, module: ir.Module) -> None:
        for op in walk(module, "kernel.contract"):
            self._schedule(op.opview)
        for op in all_ops(module.operation):
            if op.name.startswith("linalg."):
                raise CompileError(f"the rows schedule has no way to compute {op.name} at {op.location}")

    def _schedule(self, contract: Any) -> None:
        problem = _problem(contract)
        if problem is not None:
            raise CompileError(f"the rows schedule computes CSR x dense; {problem} at {contract.operation.location}")
        check_elements(contract)
        scalars = Scalars(ir.RankedTensorType(contract.rhs.type).element_type)
        lanes = self.bits // (byte_width(scalars.wide) * 8)
        vectors = _VECTORS[registers(self.bits)]
        with ir.InsertionPoint(contract), contract.location:
            scheduled = GatherRowsOp(
                contract.lhs, contract.rhs, integer(lanes), integer(vectors), integer(1 if self.l1d > _LARGE else 2),
                integer(self.gathers), result=contract.result.type,
            )  # fmt: skip
        contract.epilogue.blocks[0].append_to(scheduled.epilogue)
        contract.result.replace_all_uses_with(scheduled.result)
        contract.operation.erase()


def _problem(contract: Any) -> str | None:
    """Returns why a contraction is not y[i, n] = sum_k a[i, k] x[k, n], or y[i] = sum_k a[i, k] x[k], with a in CSR."""
    a, x, y = (ir.RankedTensorType(value.type) for value in (contract.lhs, contract.rhs, contract.result))
    if a.encoding is None or Format.parse(str(a.encoding)).levels != Format.CSR.levels or x.encoding is not None:
        return f"here are {a} and {x}"
    if not isinstance(x.element_type, ir.FloatType):
        return f"elements here are {x.element_type}"
    of_a, of_x = (dims(each) for each in affine_maps(contract.indexing_maps))
    rows, summed = of_a
    if x.rank not in (1, 2) or y.rank != x.rank or rows != 0 or of_x != [summed, *range(1, y.rank)]:
        return "the dimensions here are others"
    sums = contract.epilogue.blocks[0].arguments[0].type
    if {a.element_type, y.element_type} != {x.element_type} or sums != Scalars(x.element_type).wide:
        return f"here {a.element_type} and {x.element_type} give {y.element_type} by way of {sums}"
    return None
