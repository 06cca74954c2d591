"""lower-to-nvvm: lowers the kernels of a gpu.module to the LLVM and NVVM dialects, by upstream's conversions.

before   gpu.module @kernels { gpu.func @region_t128(%x: !llvm.ptr, ...) kernel { ... scf.for ... vector.fma ... } }
after    gpu.module @kernels { llvm.func @region_t128(%x: !llvm.ptr, ...) attributes {nvvm.kernel} { ... llvm.cond_br ... } }

Upstream turns the functions of the math dialect into calls of NVIDIA's libdevice. This pass turns those calls for which GPUs
have an instruction into LLVM's intrinsics.
"""

from dataclasses import dataclass

from torch_mlir import ir, passmanager

from gossamer.passes.loops.queries import walk
from gossamer.passes.loops.vectors import keep_rolled

_STEPS = (
    "canonicalize",
    "cse",
    "convert-nvgpu-to-nvvm",
    "convert-vector-to-scf",
    "convert-scf-to-cf",
    "expand-strided-metadata",
    "lower-affine",
    "convert-arith-to-llvm",
    "convert-gpu-to-nvvm{use-bare-ptr-memref-call-conv=1}",
    "convert-vector-to-llvm",
    "convert-nvvm-to-llvm",
    "convert-ub-to-llvm",
    "canonicalize",
    "cse",
    "reconcile-unrealized-casts",
)
_INTRINSICS = {
    "__nv_ceilf": "ceil",
    "__nv_copysignf": "copysign",
    "__nv_fabsf": "fabs",
    "__nv_floorf": "floor",
    "__nv_fma": "fma",
    "__nv_fmaf": "fma",
    "__nv_rintf": "roundeven",
    "__nv_sqrtf": "sqrt",
    "__nv_truncf": "trunc",
}


@dataclass(frozen=True)
class LowerToNvvm:
    """Lowers the content of every gpu.module."""

    def run(self, module: ir.Module) -> None:
        steps = ",".join(_STEPS)
        passmanager.PassManager.parse(f"builtin.module(gpu.module({steps}))").run(module.operation)
        keep_rolled(module)
        for call in walk(module, "llvm.call"):
            intrinsic = _INTRINSICS.get(str(call.attributes["callee"]).lstrip("@"))
            if intrinsic:
                _replace(call, f"llvm.intr.{intrinsic}")
        # The launch gives the size of dynamic shared memory, which must be external; upstream defines an empty array here.
        for variable in walk(module, "llvm.mlir.global"):
            if "llvm.array<0 x" in str(variable.attributes["global_type"]):
                variable.attributes["linkage"] = ir.Attribute.parse("#llvm.linkage<external>")


def _replace(op: ir.Operation, name: str) -> None:
    with ir.InsertionPoint(op), op.location:
        intrinsic = ir.Operation.create(name, results=[r.type for r in op.results], operands=list(op.operands))
    op.results[0].replace_all_uses_with(intrinsic.results[0])
    op.erase()
