"""The pipeline for GPUs: from a region's kernel IR to LLVM IR for NVPTX, and how each kernel is launched.

The first half, from contract IR to kernel IR, is `pipelines.plan`, with the name of a GPU family, or of an open schedule that
is in `OPEN` too, and vectors of a warp.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.launch import Launch
from gossamer.passes.finish.emit_entry import WORDS
from gossamer.passes.framework.translate import translate_to_llvm_ir
from gossamer.passes.loops.gpu_threads import LAUNCH, read_launch
from gossamer.passes.loops.queries import walk
from gossamer.passes.pipelines import Observer, Plan, check_lowered
from gossamer.passes.registry import run_pipeline
from gossamer.passes.schedules.families import GPU_FAMILIES

OPEN = {
    "rows": "lower-gpu-rows",
    "dots": "lower-gpu-dots",
    "segments": "lower-gpu-segments",
    "points": "lower-gpu-convolve-points,lower-gpu-convolve-points-grad",
}
"""Open schedules that GPUs have too, and their lowerings. Kernels take the arrays of a sparse operand, not the sizes of its
levels; a kernel's tokens are the rows of its result."""
WARP_BITS = 1024  # 32 lanes of f32: the width of vectors that the GPU families plan with


@dataclass(frozen=True)
class GpuKernels:
    """LLVM IR with kernels, how to launch each, and for each argument the dynamic dimensions of its memref."""

    llvm_ir: str
    launches: dict[str, Launch]
    words: tuple[tuple[int, ...], ...]


def lower(planned: Plan, observer: Observer | None = None) -> GpuKernels:
    """Kernel IR of a GPU family to LLVM IR; uses up the plan's module. CompileError if a pass fails."""

    def observe(label: str, after: ir.Module) -> None:
        if observer is not None:
            observer(label, "mlir", str(after))

    module, schedule = planned.module, planned.schedule
    with module.context, ir.Location.unknown():
        arrays, name = ("{arrays=true}", OPEN[schedule]) if schedule in OPEN else ("", GPU_FAMILIES[schedule].lowering)
        run_pipeline(module, f"expose-storage{arrays},{name},expand-math,emit-gpu-entry", observe)
        launches = {
            ir.StringAttr(op.attributes["sym_name"]).value: read_launch(op.attributes[LAUNCH])
            for op in walk(module, "gpu.func")
        }
        run_pipeline(module, "lower-to-nvvm", observe)
        (kernels,) = walk(module, "gpu.module")
        check_lowered(kernels, schedule)
        words = tuple(
            tuple(ir.IntegerAttr(d).value for d in ir.ArrayAttr(dims))
            for dims in ir.ArrayAttr(module.operation.attributes[WORDS])
        )
        return GpuKernels(translate_to_llvm_ir(kernels), launches, words)
