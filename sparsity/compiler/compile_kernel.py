"""Compiles contract IR to a callable kernel: passes plan and lower it, LLVM makes machine code, equal kernels are shared.

It calls passes/pipelines.py (plan, lower), runtime/jit.py (machine code) and the cache on disk. Backend and sparsity/operations
call `compile_region`.
"""

import hashlib
import threading
from weakref import WeakValueDictionary

import llvmlite.binding as llvm

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.passes import pipelines
from gossamer.passes.codegen.emit_entry import ENTRY
from gossamer.passes.framework.origins import StageText, carried, of_assembly, of_llvm_ir
from gossamer.runtime import disk_cache, jit
from gossamer.runtime.data_cache import first_level_bytes
from gossamer.runtime.modules.given_back import give_back
from gossamer.runtime.recall import Note
from gossamer.runtime.region_kernel import RegionKernel, find, full, made
from gossamer.runtime.target import Target, host
from gossamer.runtime.versions import compiler
from gossamer.sparsity.compiler.labelled import labelled

_lock = threading.Lock()
_by_contract: WeakValueDictionary[tuple[str, str, Target], RegionKernel] = WeakValueDictionary()


def compile_region(
    contract: str,
    *,
    schedule: str = "auto",
    observer: pipelines.Observer | None = None,
    target: Target | None = None,
    request: str | None = None,
) -> RegionKernel:
    """Returns the kernel for a module of contract IR with one function, for this machine unless a target is given.

    observer(stage, suffix, text) is called for every stage in order. With an observer, the region is always compiled anew.
    `request` is a key by which `recall_region` finds the kernel again.
    Raises CompileError if a pass or LLVM refuses the region, OptionError for an unknown schedule.
    """
    names = "auto", pipelines.CHAIN, pipelines.SEQUENCE, *pipelines.SCHEDULES
    if schedule not in names and not pipelines.is_open(schedule):
        raise OptionError(f"unknown schedule {schedule!r}, there are auto, {', '.join(pipelines.SCHEDULES)}")
    target = target or host()
    with _lock:
        known = _by_contract.get((contract, schedule, target)) if observer is None else None
        if known is None:
            known = _by_contract[contract, schedule, target] = _choose(contract, schedule, observer, target)
            give_back()
        if request is not None:
            known.note.write(full(request, target))
        return known


def compile_kernel_ir(text: str) -> RegionKernel:
    """Returns the kernel for kernel IR from a dump, for this machine. CompileError if it cannot be compiled."""
    target = host()
    with _lock:
        return _made(pipelines.planned(text, target.vector_bits, target.instructions), None, target)


def _choose(contract: str, schedule: str, observer: pipelines.Observer | None, target: Target) -> RegionKernel:
    """Compiles with a schedule. "auto" tries "broadcast", then "reference"."""
    if schedule != "auto":
        return _compile(contract, schedule, observer, target)
    try:
        return _compile(contract, "broadcast", observer, target)
    except CompileError:
        return _compile(contract, "reference", observer, target)


def _compile(contract: str, schedule: str, observer: pipelines.Observer | None, target: Target) -> RegionKernel:
    can = target.instructions, first_level_bytes(), target.gathers
    return _made(pipelines.plan(contract, schedule, target.vector_bits, observer, *can), observer, target)


def _made(plan: pipelines.Plan, observer: pipelines.Observer | None, target: Target) -> RegionKernel:
    """Returns the kernel of a plan, from this process or the disk if they have it."""
    key = hashlib.sha256(f"{plan.text}\n{target}\n{compiler()}".encode()).hexdigest()[:32]
    note = Note(key, plan.schedule, plan.formats, plan.sized, plan.numbers)
    known = find(note) if observer is None else None
    return made(note, _machine_code(plan, target, observer)) if known is None else known


def _machine_code(plan: pipelines.Plan, target: Target, observer: pipelines.Observer | None) -> disk_cache.Entry:
    lowered = pipelines.lower(plan, target.rounds_to_bf16, observer, target.streams)
    module = jit.optimize(lowered.llvm_ir, target) if observer is None else _shown(lowered, plan, target, observer)
    call = {
        "entry": ENTRY, "words": lowered.words, "workspace": lowered.workspace, "tile_workspace": lowered.tile_workspace,
    }  # fmt: skip
    return disk_cache.Entry(jit.object_code(module, target), call)


def _shown(lowered: pipelines.Lowered, plan: pipelines.Plan, target: Target, observer: pipelines.Observer) -> llvm.ModuleRef:
    """Returns the optimised module of a kernel. Passes its LLVM IR and assembly, with the origins of lines, to the observer.

    The module has line numbers, which do not change the machine code.
    """
    assert lowered.traced is not None  # lowering with an observer keeps the traced IR
    try:
        module, origins = jit.optimize(lowered.traced.llvm_ir, target), lowered.traced.origins
    except CompileError:  # LLVM refuses the line numbers
        module, origins = jit.optimize(lowered.llvm_ir, target), ()
    ir, assembly = of_llvm_ir(str(module), origins), of_assembly(jit.assembly(module, target, comments=True), origins)
    text = labelled(assembly, plan.text, plan.schedule)
    observer("llvm", "ll", ir)
    observer("assembly", "s", StageText(text, origins=carried(text, assembly, assembly.origins)))
    return module
