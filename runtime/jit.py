"""Compiles LLVM IR to machine code in this process, with llvmlite: `optimize`, then `object_code`, then `load`."""

import ctypes
import glob
import os
import re
import threading
from dataclasses import dataclass, replace
from functools import cache

import llvmlite.binding as llvm

from gossamer.dialects.errors import CompileError
from gossamer.runtime.llvm_text import bfloat_as_bits, readable_by_older
from gossamer.runtime.target import Target, initialize

# Held around all calls: llvmlite's LLVM has global state while it parses and optimises.
_LLVM = threading.Lock()

_OPENMP = re.compile(r".*/lib[gi]?omp[-.\d].*")
"""Matches the OpenMP runtimes of GNU and Intel, and LLVM's on macOS. It must not match other names with "omp": a library that
depends on all of torch would hide symbols of other libraries, such as MKL."""


@dataclass(frozen=True)
class Code:
    """Machine code in memory. The `address` of the entry function is valid as long as this object lives."""

    address: int
    library: llvm.orcjit.ResourceTracker
    linker: llvm.orcjit.LLJIT


def optimize(llvm_ir: str, target: Target) -> llvm.ModuleRef:
    """Parses LLVM IR as MLIR prints it, and runs LLVM's passes for the target's level. Raises CompileError if LLVM refuses it.

    For a target that does not round to bf16, the module must not compute with bfloat.
    """
    text = readable_by_older(llvm_ir)
    if not target.rounds_to_bf16:
        text = bfloat_as_bits(text)
    with _LLVM:
        machine = target.machine()
        try:
            # LLVM's global context would keep the types and constants of every module forever.
            module = llvm.parse_assembly(text, llvm.context.create_context())
            module.triple, module.data_layout = target.triple, str(machine.target_data)
            module.verify()
        except RuntimeError as problem:
            raise CompileError(f"LLVM refuses the kernel: {problem}") from problem
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=target.level))
        builder.getModulePassManager().run(module, builder)
        return module


def assembly(module: llvm.ModuleRef, target: Target, comments: bool = False) -> str:
    """Returns the assembly of an optimised module. With `comments`, LLVM notes where loops are and what shuffles do."""
    with _LLVM:
        machine = _generator(module, target)
        machine.set_asm_verbosity(comments)
        return machine.emit_assembly(module)


def object_code(module: llvm.ModuleRef, target: Target) -> bytes:
    """Returns the object code of an optimised module. Raises CompileError if it needs a function that this process lacks."""
    with _LLVM:
        machine = _generator(module, target)
        _bind_libraries()
        declared = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
        if missing := [name for name in declared if llvm.address_of_symbol(name) is None]:
            raise CompileError(f"the kernel needs {', '.join(missing)}, which this process does not have")
        return bytes(machine.emit_object(module))


def _generator(module: llvm.ModuleRef, target: Target) -> llvm.TargetMachine:
    """Returns the target machine that generates code of an optimised module, at level 1 or higher if it uses AMX tiles.

    At level 0, LLVM 22 crashes on AMX's tiles of bytes, and on tiles in several loops of a function.
    """
    has_tiles = any(function.name.startswith("llvm.x86.tdp") for function in module.functions)
    return (replace(target, level=max(target.level, 1)) if has_tiles else target).machine()


def load(code: bytes, entry: str) -> Code:
    """Links object code into this process. Raises CompileError if that fails."""
    with _LLVM:
        initialize()
        _bind_libraries()
        linker = llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
        objects = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
        try:
            library = objects.export_symbol(entry).link(linker, "kernel")
        except RuntimeError as problem:
            raise CompileError(f"the kernel's code cannot be linked: {problem}") from problem
        return Code(library[entry], library, linker)


@cache
def _bind_libraries() -> None:
    """Makes the libraries of this process, and PyTorch's OpenMP runtime, visible to generated code."""
    llvm.create_lljit_compiler()  # without one, LLVM does not even find the functions of libm
    if llvm.address_of_symbol("GOMP_parallel") is not None:
        return
    import torch

    for library in filter(_OPENMP.fullmatch, glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "*omp*"))):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        llvm.load_library_permanently(library)
