"""The pipeline for GPUs: lowers a region's kernel IR to LLVM IR for NVPTX, and says how to launch each kernel.

`pipelines.plan` makes the kernel IR from contract IR. It gets the name of a GPU family, or of an open schedule whose ops have a
lowering for GPUs, and the vector width of a warp. Kernels take the arrays of a sparse operand, but not the sizes of its levels.
The tokens of a kernel are the rows of its result.
"""

from dataclasses import dataclass

from torch_mlir import ir

from gossamer.dialects.launch import Launch
from gossamer.passes.codegen.emit_entry import WORDS
from gossamer.passes.framework.translate import translate_to_llvm_ir
from gossamer.passes.loops.gpu_threads import LAUNCH, read_launch
from gossamer.passes.loops.queries import walk
from gossamer.passes.pipelines import Observer, Plan, check_lowered, lowering_of
from gossamer.passes.registry import run_pipeline
from gossamer.passes.schedules.families import GPU_FAMILIES

WARP_BITS = 1024  # 32 lanes of f32: the width of vectors that the GPU families plan with


@dataclass(frozen=True)
class GpuKernels:
    """LLVM IR with kernels, a `Launch` for each, and for each argument the dynamic dimensions of its memref."""

    llvm_ir: str
    launches: dict[str, Launch]
    words: tuple[tuple[int, ...], ...]


def lower(planned: Plan, observer: Observer | None = None) -> GpuKernels:
    """Lowers the kernel IR of a GPU family to LLVM IR. This consumes the plan's module. CompileError if a pass fails."""

    def observe(label: str, after: ir.Module) -> None:
        if observer is not None:
            observer(label, "mlir", str(after))

    module, schedule = planned.module, planned.schedule
    with module.context, ir.Location.unknown():
        if schedule in GPU_FAMILIES:
            lowering = f"expose-storage,{GPU_FAMILIES[schedule].lowering}"
        else:
            lowering = f"expose-storage{{arrays=true}},{lowering_of(module, schedule, {}, gpu=True)}"
        run_pipeline(module, f"{lowering},expand-math,emit-gpu-entry", observe)
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
