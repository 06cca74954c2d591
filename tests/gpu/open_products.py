"""Products with a CSR matrix of open shape: contract IR, the kernels made of it, and their run in the emulator."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.ptx import Architecture, assemble
from tests.gpu.kernels import run

_CSR = "#CSR = #sparse_tensor.encoding<{ map = (d0, d1) -> (d0 : dense, d1 : compressed) }>\n"
_SPMM = """
func.func @region(%a: tensor<?x?xE, #CSR>, %x: tensor<?x?xE>) -> tensor<?x?xE> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero = arith.constant 0.0 : SUM
  %m = tensor.dim %a, %c0 : tensor<?x?xE, #CSR>
  %n = tensor.dim %x, %c1 : tensor<?x?xE>
  %empty = tensor.empty(%m, %n) : tensor<?x?xSUM>
  %start = linalg.fill ins(%zero : SUM) outs(%empty : tensor<?x?xSUM>) -> tensor<?x?xSUM>
  %sums = linalg.generic {indexing_maps = [affine_map<(i, k, j) -> (i, k)>, affine_map<(i, k, j) -> (k, j)>,
                                           affine_map<(i, k, j) -> (i, j)>],
                          iterator_types = ["parallel", "reduction", "parallel"]}
    ins(%a, %x : tensor<?x?xE, #CSR>, tensor<?x?xE>) outs(%start : tensor<?x?xSUM>) {
  ^bb0(%left: E, %right: E, %total: SUM):
    WIDEN
    %product = arith.mulf %l, %r : SUM
    %sum = arith.addf %total, %product : SUM
    linalg.yield %sum : SUM
  } -> tensor<?x?xSUM>
  NARROW
}
"""
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
_TRUNCATE = """%out = tensor.empty(%m, %n) : tensor<?x?xE>
  %y = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
                       iterator_types = ["parallel", "parallel"]}
    ins(%sums : tensor<?x?xSUM>) outs(%out : tensor<?x?xE>) {
  ^bb0(%sum: SUM, %old: E):
    %narrow = arith.truncf %sum : SUM to E
    linalg.yield %narrow : E
  } -> tensor<?x?xE>
  return %y : tensor<?x?xE>"""


@dataclass(frozen=True)
class Csr:
    """A matrix as three arrays, with 64-bit positions and coordinates as torch has them."""

    dense: Tensor

    @property
    def arrays(self) -> list[Tensor]:
        rows, columns = self.dense.nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=self.dense.shape[0])
        return [torch.cat([counts.new_zeros(1), counts.cumsum(0)]), columns, self.dense[rows, columns]]


def contract(schedule: str, element: str) -> str:
    """Contract IR of what the schedule computes: "rows" a product, "dots" a sampled one."""
    wide = element in ("f32", "f64")
    text = {"rows": _SPMM, "dots": _SDDMM}[schedule]
    text = text.replace("NARROW", "return %sums : tensor<?x?xE>" if wide else _TRUNCATE)
    if wide:
        text = text.replace("WIDEN\n", "\n").replace("%l,", "%left,").replace("%r ", "%right ")
    else:
        text = text.replace("WIDEN", _EXTEND)
    return _CSR + text.replace("SUM", element if wide else "f32").replace("xE", f"x{element}").replace(
        ": E", f": {element}"
    ).replace("-> E", f"-> {element}").replace("to E", f"to {element}")


@dataclass(frozen=True)
class Compiled:
    """Kernels and their PTX."""

    kernels: gpu_pipelines.GpuKernels
    ptx: str


@cache
def compiled(schedule: str, element: str, capability: int = 90) -> Compiled:
    """The kernels of a schedule."""
    kernels = gpu_pipelines.lower(pipelines.plan(contract(schedule, element), schedule, gpu_pipelines.WARP_BITS))
    return Compiled(kernels, assemble(kernels.llvm_ir, Architecture(capability)))


def emulate(
    made: Compiled, variant: str, matrix: Tensor, dense: list[Tensor], size: tuple[int, ...], *,
    seed: int | None = None, ptx: str | None = None,
) -> Tensor:  # fmt: skip
    """What one of the kernels computes, `size` of it, for a matrix with zeros and dense operands."""
    out = torch.full(size, float("nan"), dtype=matrix.dtype)
    return run(made.kernels, ptx or made.ptx, variant, [*Csr(matrix).arrays, *dense, out], seed)
