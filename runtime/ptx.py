"""Compiles LLVM IR to PTX in this process, with llvmlite: optimised at O3 for an NVIDIA architecture."""

import re
from dataclasses import dataclass

import llvmlite.binding as llvm

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.runtime.jit import _LLVM
from gossamer.runtime.llvm_text import readable_by_older
from gossamer.runtime.target import initialize

_TRIPLE = "nvptx64-nvidia-cuda"
# The PTX ISA for each compute capability: the first version that has it, but at least 8.5 (mma.sp with ordered metadata; CUDA
# 12.5).
_ISA = {80: 85, 86: 85, 87: 85, 89: 85, 90: 85, 100: 86, 103: 88, 120: 87}


@dataclass(frozen=True)
class Architecture:
    """The compute capability that PTX is made for, such as 80, 90 or 100. The PTX also runs on every later one."""

    capability: int

    def __post_init__(self) -> None:
        if self.capability not in _ISA:
            known = ", ".join(map(str, _ISA))
            raise OptionError(f"no PTX is made for compute capability {self.capability}, only for {known}")

    @classmethod
    def of_device(cls, major: int, minor: int) -> "Architecture":
        """Returns the newest architecture whose PTX a device of this compute capability runs. Raises OptionError if it is too
        old.
        """
        usable = [known for known in _ISA if known <= 10 * major + minor]
        if not usable:
            raise OptionError(f"the GPU has compute capability {major}.{minor}, kernels need {min(_ISA) / 10} or newer")
        return cls(max(usable))

    @property
    def name(self) -> str:
        """The name in LLVM and ptxas, such as sm_90."""
        return f"sm_{self.capability}"

    def machine(self) -> llvm.TargetMachine:
        """Returns LLVM's target machine at O3."""
        initialize()
        features = f"+ptx{_ISA[self.capability]}"
        return llvm.Target.from_triple(_TRIPLE).create_target_machine(cpu=self.name, features=features, opt=3)


def assemble(llvm_ir: str, architecture: Architecture) -> str:
    """Returns the PTX of a module of kernels in LLVM IR as MLIR prints it.

    Raises CompileError if LLVM refuses the module, or if it calls a function that it does not define.
    """
    with _LLVM:
        machine = architecture.machine()
        try:
            module = llvm.parse_assembly(readable_by_older(llvm_ir))
            module.triple, module.data_layout = _TRIPLE, str(machine.target_data)
            module.verify()
        except RuntimeError as problem:
            raise CompileError(f"LLVM refuses the kernel: {problem}") from problem
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        if missing := [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]:
            raise CompileError(f"the kernel needs {', '.join(missing)}, which GPU kernels do not have")
        return re.sub(r"[ \t]+$", "", machine.emit_assembly(module), flags=re.MULTILINE)
