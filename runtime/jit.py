"""LLVM IR to machine code in this process, by llvmlite: optimised at O3 for a target, checked for missing symbols."""

import ctypes
import glob
import os
import re
import threading
from dataclasses import dataclass

import llvmlite.binding as llvm

from gossamer.dialects.errors import CompileError
from gossamer.runtime.llvm_text import bfloat_as_bits, readable_by_older
from gossamer.runtime.target import Target

# llvmlite's LLVM keeps global state while it parses and optimises.
_LLVM = threading.Lock()


@dataclass(frozen=True)
class Code:
    """Machine code in memory; `address` of the entry function holds as long as this object."""

    address: int
    library: llvm.orcjit.ResourceTracker
    linker: llvm.orcjit.LLJIT


def optimize(llvm_ir: str, target: Target) -> llvm.ModuleRef:
    """Parse LLVM IR as MLIR prints it and run LLVM's O3 pipeline for the target. CompileError if LLVM refuses it.

    For a target that does not round to bf16, the module must not compute with bfloat.
    """
    text = readable_by_older(llvm_ir)
    if not target.rounds_to_bf16:
        text = bfloat_as_bits(text)
    with _LLVM:
        machine = target.machine()
        try:
            module = llvm.parse_assembly(text)
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
        machine = target.machine()
        linker = llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
        objects = llvm.JITLibraryBuilder().add_object_img(machine.emit_object(module)).add_current_process()
        try:
            library = objects.export_symbol(entry).link(linker, "kernel")
        except RuntimeError as problem:
            missing = ", ".join(_missing(module, machine)) or str(problem)
            raise CompileError(f"the kernel needs {missing}, which this process does not have") from problem
        return Code(library[entry], library, linker)


def _missing(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> list[str]:
    """The functions that a module calls and nothing defines; LLVM adds calls of its own when it generates code."""
    called = set(re.findall(r"^\s+(?:call|callq|jmp|b|bl)\s+\*?([A-Za-z_]\w*)", machine.emit_assembly(module), re.M))
    called -= {f.name for f in module.functions if not f.is_declaration}
    return sorted(name for name in called if llvm.address_of_symbol(name) is None)


def _bind_openmp() -> None:
    """Make the OpenMP runtime that PyTorch runs on visible to generated code."""
    if llvm.address_of_symbol("GOMP_parallel") is not None:
        return
    import torch

    for library in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "lib*omp*")):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        llvm.load_library_permanently(library)
