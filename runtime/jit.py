"""LLVM IR to machine code in this process, by llvmlite: optimised at O3 for a target, checked for missing symbols."""

import ctypes
import glob
import os
import threading
from dataclasses import dataclass

import llvmlite.binding as llvm

from gossamer.dialects.errors import CompileError
from gossamer.runtime.llvm_text import readable_by_older
from gossamer.runtime.target import Target

# llvmlite's LLVM keeps global state while it parses and optimises.
_LLVM = threading.Lock()


@dataclass(frozen=True)
class Code:
    """Machine code in memory; `address` of the entry function holds as long as this object."""

    address: int
    engine: llvm.ExecutionEngine


def optimize(llvm_ir: str, target: Target) -> llvm.ModuleRef:
    """Parse LLVM IR as MLIR prints it and run LLVM's O3 pipeline for the target. CompileError if LLVM refuses it."""
    with _LLVM:
        machine = target.machine()
        try:
            module = llvm.parse_assembly(readable_by_older(llvm_ir))
            module.triple, module.data_layout = target.triple, str(machine.target_data)
            module.verify()
        except RuntimeError as problem:
            raise CompileError(f"LLVM refuses the kernel: {problem}") from problem
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        return module


def assembly(module: llvm.ModuleRef, target: Target) -> str:
    """The assembly of an optimised module."""
    with _LLVM:
        return target.machine().emit_assembly(module)


def load(module: llvm.ModuleRef, target: Target, entry: str) -> Code:
    """Generate code from an optimised module and resolve its symbols. CompileError if one is missing."""
    with _LLVM:
        _bind_openmp()
        # A symbol that cannot be resolved would end the process, so they are looked up first.
        missing = [
            f.name
            for f in module.functions
            if f.is_declaration and not f.name.startswith("llvm.") and llvm.address_of_symbol(f.name) is None
        ]
        if missing:
            raise CompileError(f"the kernel needs {', '.join(missing)}, which this process does not have")
        engine = llvm.create_mcjit_compiler(module, target.machine(jit=True))
        engine.finalize_object()
        return Code(engine.get_function_address(entry), engine)


def _bind_openmp() -> None:
    """Make the OpenMP runtime that PyTorch runs on visible to generated code."""
    if llvm.address_of_symbol("GOMP_parallel") is not None:
        return
    import torch

    for library in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "lib*omp*")):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        llvm.load_library_permanently(library)
