"""Products with a CSR matrix of open shape: contract IR, the kernels made of it, and their run in the emulator."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.ptx import Architecture, assemble
from tests.gpu.kernels import run
from tests.open_contracts import OpenProduct

_CSR = "#CSR = #sparse_tensor.encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }>\n"
_SDDMM = """
func.func @region(%a: tensor<?x?xE, #CSR>, %x: tensor<?x?xE>, %y: tensor<?x?xE>) -> tensor<?xE> {
  %v = "kernel.sample"(%a) ({
    %left = "kernel.read"(%x) {map = affine_map<(i, j, k) -> (i, k)>} : (tensor<?x?xE>) -> E
    %right = "kernel.read"(%y) {map = affine_map<(i, j, k) -> (j, k)>} : (tensor<?x?xE>) -> E
    WIDEN
    %product = arith.mulf %l, %r fastmath<reassoc,contract> : SUM
    "kernel.yield"(%product) : (SUM) -> ()
  }) {reduced = 1 : i64} : (tensor<?x?xE, #CSR>) -> tensor<?xE>
  return %v : tensor<?xE>
}
"""
_SAME = "%l = arith.addf %left, %none : SUM\n    %r = arith.addf %right, %none : SUM"
_EXTEND = "%l = arith.extf %left : E to SUM\n    %r = arith.extf %right : E to SUM"


@dataclass(frozen=True)
class Csr:
    """A matrix as three arrays, with 64-bit positions and coordinates as torch has them."""

    dense: Tensor

    @property
    def arrays(self) -> list[Tensor]:
        rows, columns = self.dense.nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=self.dense.shape[0])
        return [torch.cat([counts.new_zeros(1), counts.cumsum(0)]), columns, self.dense[rows, columns]]


def contract(schedule: str, element: str, steps: tuple[str, ...] = (), vector: bool = False) -> str:
    """Contract IR of what the schedule computes: "rows" a product and the steps of its epilogue, "dots" a sampled one."""
    if schedule == "rows":
        return OpenProduct(element, steps, vector).text()
    wide, text = element in ("f32", "f64"), _SDDMM
    if wide:
        text = text.replace("WIDEN\n", "\n").replace("%l,", "%left,").replace("%r ", "%right ")
    else:
        text = text.replace("WIDEN", _EXTEND)
    return _CSR + text.replace("SUM", element if wide else "f32").replace("xE", f"x{element}").replace(
        ": E", f": {element}"
    ).replace("-> E", f"-> {element}")


@dataclass(frozen=True)
class Compiled:
    """Kernels and their PTX."""

    kernels: gpu_pipelines.GpuKernels
    ptx: str


@cache
def compiled(schedule: str, element: str, capability: int = 90, steps: tuple[str, ...] = (), vector: bool = False) -> Compiled:
    """The kernels of a schedule."""
    text = contract(schedule, element, steps, vector)
    kernels = gpu_pipelines.lower(pipelines.plan(text, schedule, gpu_pipelines.WARP_BITS))
    return Compiled(kernels, assemble(kernels.llvm_ir, Architecture(capability)))


def emulate(
    made: Compiled, variant: str, matrix: Tensor, dense: list[Tensor], size: tuple[int, ...], *,
    seed: int | None = None, ptx: str | None = None,
) -> Tensor:  # fmt: skip
    """What one of the kernels computes, `size` of it, for a matrix with zeros and dense operands."""
    out = torch.full(size, float("nan"), dtype=matrix.dtype)
    return run(made.kernels, ptx or made.ptx, variant, [*Csr(matrix).arrays, *dense, out], seed)
