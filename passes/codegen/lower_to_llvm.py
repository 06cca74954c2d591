"""lower-to-llvm: lowers loops, vectors and memrefs to the LLVM dialect, by MLIR's own conversions.

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
    """Lower to the LLVM dialect.

    bits  width of vectors when LLVM vectorises by itself
    bf16  whether the target has an instruction that rounds to bf16. Without one, LLVM would call a function that few processes
          have, so the rounding is written out in integers.

    Functions are not inlined. They are called once for each tile, and LLVM would spend most of its time on the copies. A loop
    with the attribute ROLLED is not unrolled, because it has few and unpredictably many rounds.
    """

    bits: int = 512
    bf16: bool = False

    def run(self, module: ir.Module) -> None:
        steps = ",".join(_STEPS) % str(not self.bf16).lower()
        manager = passmanager.PassManager.parse(f"builtin.module({steps})")
        manager.enable_verifier(False)  # a quarter of the time; the result is verified after the pass anyway
        manager.run(module.operation)
        keep_rolled(module)
        width = ir.ArrayAttr.get([ir.StringAttr.get("prefer-vector-width"), ir.StringAttr.get(str(self.bits))])
        for op in module.body.operations:
            if isinstance(op, llvm.LLVMFuncOp) and len(op.operation.regions[0].blocks):
                op.attributes["passthrough"] = ir.ArrayAttr.get([width, ir.StringAttr.get("noinline")])
