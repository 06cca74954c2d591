"""lower-to-llvm: loops, vectors and memrefs to the LLVM dialect, by upstream's conversions.

before   func.func @entry(%words: !llvm.ptr) { ... scf.for ... vector.fma ... }
after    llvm.func @entry(%words: !llvm.ptr) { ... llvm.cond_br ... llvm.intr.fmuladd ... }
"""

from dataclasses import dataclass

from torch_mlir import ir, passmanager
from torch_mlir.dialects import llvm

from gossamer.passes.loops.vectors import keep_rolled

_STEPS = (
    "canonicalize",
    "cse",
    "convert-vector-to-scf",
    "convert-scf-to-cf",
    "expand-strided-metadata",
    "lower-affine",
    "convert-vector-to-llvm{force-32bit-vector-indices=true enable-x86=true}",
    "convert-math-to-llvm",
    "convert-math-to-libm",
    "arith-expand{include-bf16=%s}",
    "convert-to-llvm",
    "canonicalize",
    "cse",
    "reconcile-unrealized-casts",
)


@dataclass(frozen=True)
class LowerToLlvm:
    """`bits` asks LLVM for vectors of this width where it vectorises by itself. Functions stay apart: they are called once a
    tile, and a copy of each at every call would take LLVM most of its time.

    A loop with the attribute ROLLED is not unrolled: one that has few rounds, and a number that cannot be foretold.

    `bf16` says that the target has an instruction that rounds to bf16. Where it has not, LLVM would call a function that
    few processes contain, so the rounding is spelled out in integers.
    """

    bits: int = 512
    bf16: bool = False

    def run(self, module: ir.Module) -> None:
        steps = ",".join(_STEPS) % str(not self.bf16).lower()
        manager = passmanager.PassManager.parse(f"builtin.module({steps})")
        manager.enable_verifier(False)  # what comes out is verified as that of every pass; between the steps it takes a quarter
        manager.run(module.operation)
        keep_rolled(module)
        width = ir.ArrayAttr.get([ir.StringAttr.get("prefer-vector-width"), ir.StringAttr.get(str(self.bits))])
        for op in module.body.operations:
            if isinstance(op, llvm.LLVMFuncOp) and len(op.operation.regions[0].blocks):
                op.attributes["passthrough"] = ir.ArrayAttr.get([width, ir.StringAttr.get("noinline")])
