"""The pass pipelines of each schedule: they lower a region's contract IR to LLVM IR, in two halves.

`plan` turns contract IR into kernel IR. The text of kernel IR has everything that the machine code depends on, so equal texts
share one kernel. `lower` turns kernel IR into LLVM IR. The schedule "reference" uses MLIR's own sparsifier instead of ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch_mlir import ir

from gossamer.dialects.errors import CompileError
from gossamer.dialects.format import Format
from gossamer.dialects.kernel import KernelDialect
from gossamer.dialects.packing import Packing
from gossamer.passes.chains.lower_chain import TILE_WORKSPACE
from gossamer.passes.codegen.emit_entry import WORDS
from gossamer.passes.framework.context import context
from gossamer.passes.framework.origins import Traced, printed, share_places, traced
from gossamer.passes.framework.translate import translate_to_llvm_ir
from gossamer.passes.loops.encodings import storage_of_type
from gossamer.passes.loops.queries import all_ops, public_functions, walk
from gossamer.passes.loops.vectors import WORKSPACE
from gossamer.passes.registry import get, names, run_pipeline
from gossamer.passes.schedules.families import FAMILIES

Observer = Callable[[str, str, str], None]  # gets stage, file suffix, and text, usually a StageText with its origins

# Kernels compute narrow floats in f32 and round once, at the end. CPUs are no faster in bf16 or f16, and functions such as
# erf exist only for f32 and f64.
_WIDEN = (
    "math-extend-to-supported-types{target-type=f32},arith-emulate-unsupported-floats{source-types=bf16,f16 target-type=f32}"
)
_NORMALIZE = (
    "keep-nan,propagate-encodings,func.func(linalg-generalize-named-ops),linalg-fuse-elementwise-ops,"
    f"math-expand-ops{{ops=fpowi}},{_WIDEN},keep-wide,canonicalize,cse"
)
_FUSE = "fuse-epilogue,narrow-sums,lift-rows,lift-inner,inline-stages,canonicalize,cse"
_FINISH = "expand-math{bits=%d},parallelize,emit-entry"
# The parts of MLIR's pipeline "sparsifier", because the pipeline itself frees nothing that it allocates. A sparse result grows
# by reallocating its arrays, and the last ones belong to the caller. So such a region frees only the arrays that it replaced.
_SPARSIFY = (
    "lower-sample,eliminate-empty-tensors,sparsification-and-bufferization,expose-specifiers,"
    "sparse-storage-specifier-to-llvm,%s,func.func(convert-linalg-to-loops)"
)
_FREE, _FREE_OUTGROWN = "buffer-deallocation-pipeline", "expand-realloc{emit-deallocs=true}"
SCHEDULES = (*FAMILIES, "reference")
CHAIN = "chain"
"""The schedule of several products that run tile by tile: the hints of each weight name its family."""
SEQUENCE = "sequence"
"""The schedule of the same products for a few tokens: each product is lowered by its own family, one after the other."""
_ROWS = "fuse-epilogue,canonicalize,gather-rows{bits=%d l1d=%c gathers=%g}"
OPEN_SCHEDULES = {
    "rows": _ROWS,
    "slices": f"{_ROWS},slice-rows{{gathers=%g}}",
    "slices16": f"{_ROWS},slice-rows{{width=16 gathers=%g}}",
    "tall": "multiply-tall{bits=%d}",
    "dots": "sample-rows{bits=%d}",
    "gustavson": "multiply-rows",
    "convolve": "fuse-epilogue,canonicalize,cse,convolve{bits=%d}",
}
"""For each schedule of operations on sparse tensors of any shape: the passes that plan it. (A call passes such tensors.)

A schedule with the name of a lowering needs no planning and is not listed: "take" is lowered by lower-take. The ops themselves
name the passes that lower them (see `lowering_of`).
"""


def is_open(schedule: str) -> bool:
    """Whether this is the name of a schedule of operations of any shape."""
    lowering = f"lower-{schedule}"
    return schedule in OPEN_SCHEDULES or (
        lowering in names() and any(op.lowering == lowering for op in KernelDialect.operations)
    )


def lowering_of(module: ir.Module, schedule: str, options: Mapping[str, int], gpu: bool = False) -> str:
    """Returns the passes that lower the kernel ops of a module. Each gets those of `options` that are fields of it.

    CompileError if no pass lowers the ops.
    """
    there = {op.name for op in all_ops(module.operation)}
    lowerings = [op.lowering for op in KernelDialect.operations if op.OPERATION_NAME in there]
    if gpu:
        lowerings = [lowering.replace("lower-", "lower-gpu-", 1) for lowering in lowerings]
    passes: dict[str, Any] = {name: get(name) for name in lowerings if name in names()}
    if not passes:
        where = " for GPUs" if gpu else ""
        raise CompileError(f"the {schedule} schedule cannot compile the region: no pass lowers its ops{where}")
    own = {name: [field.name for field in fields(each) if field.name in options] for name, each in passes.items()}
    return ",".join(
        f"{name}{{{' '.join(f'{each}={str(options[each]).lower()}' for each in given)}}}" for name, given in own.items()
    )


@dataclass(frozen=True)
class Plan:
    """A region in kernel IR.

    formats  one entry per argument, None for a dense one
    sized    one entry per argument: whether the kernel also gets the sizes of its levels (a sparse operand of dynamic shape)
    numbers  one entry per argument: whether it is a number instead of a tensor
    tiles    whether the target multiplies tiles of bf16 (AMX)
    """

    text: str
    schedule: str
    vector_bits: int
    formats: tuple[Format | Packing | None, ...]
    sized: tuple[bool, ...]
    numbers: tuple[bool, ...]
    tiles: bool
    module: ir.Module


@dataclass(frozen=True)
class Lowered:
    """A region in LLVM IR.

    llvm_ir         has a function `emit_entry.ENTRY`
    words           for each argument the dynamic dimensions of its memref
    workspace       bytes that each thread needs
    tile_workspace  bytes that the tiles of a chain need (see `lower_chain.TILE_WORKSPACE`)
    traced          the LLVM IR with the origins of its lines; None without an observer
    """

    llvm_ir: str
    words: tuple[tuple[int, ...], ...]
    workspace: int
    tile_workspace: tuple[int, ...]
    traced: Traced | None = None


_SEQUENCE_MARK = "kernel.sequence"
_IN_STAGES = ("kernel.read", "kernel.inner", "kernel.yield")


def plan(
    contract: str,
    schedule: str,
    vector_bits: int,
    observer: Observer | None = None,
    features: frozenset[str] = frozenset(),
    l1d: int = 32 << 10,
    gathers: bool = False,
) -> Plan:
    """Turns contract IR (text) into kernel IR. CompileError if the text is wrong or the schedule cannot compute the region.

    `features` are instructions of the target that schedules ask for (`Target.instructions`). `l1d` is the size of its
    first-level data cache in bytes. `gathers` says that its gather instructions are faster than single loads.
    """
    with context(), ir.Location.unknown():
        module = _parsed(contract, "contract")
        _run(module, _planning(schedule, vector_bits, features, l1d, gathers), observer)
        if schedule == SEQUENCE:  # a sequence has the same ops as a chain
            module.operation.attributes[_SEQUENCE_MARK] = ir.UnitAttr.get()
        return _plan_of(module, schedule, vector_bits, features)


def planned(kernel_ir: str, vector_bits: int, features: frozenset[str] = frozenset()) -> Plan:
    """Returns the plan of a dump: kernel IR (text) of a product or a chain. CompileError for any other text."""
    with context(), ir.Location.unknown():
        module = _parsed(kernel_ir, "kernel")
        stages = [op for op in all_ops(module.operation) if op.name.startswith("kernel.") and op.name not in _IN_STAGES]
        products = [op for op in stages if op.name == "kernel.spmm"]
        if not products:
            raise CompileError("the kernel IR has no kernel.spmm: only products and chains of them can be run by themselves")
        if len(stages) > 1 or walk(module, "kernel.inner"):
            schedule = SEQUENCE if _SEQUENCE_MARK in module.operation.attributes else CHAIN
        else:
            schedule = ir.StringAttr(products[0].attributes["schedule"]).value
        return _plan_of(module, schedule, vector_bits, features)


def _parsed(text: str, what: str) -> ir.Module:
    try:
        return ir.Module.parse(text)
    except ir.MLIRError as error:
        raise CompileError(f"the {what} IR does not parse: {error}") from error


def _plan_of(module: ir.Module, schedule: str, vector_bits: int, features: frozenset[str]) -> Plan:
    region = next(op for op in module.body.operations if op.operation.name == "func.func")
    types = [a.type for a in region.operation.regions[0].blocks[0].arguments]
    tensors = [ir.RankedTensorType(t) if isinstance(t, ir.RankedTensorType) else None for t in types]
    formats = tuple(storage_of_type(t) if t is not None else None for t in tensors)
    sized = tuple(t is not None and t.encoding is not None and not t.has_static_shape for t in tensors)
    numbers = tuple(t is None for t in tensors)
    return Plan(str(module), schedule, vector_bits, formats, sized, numbers, "amx" in features, module)


def lower(planned: Plan, bf16: bool = False, observer: Observer | None = None, streams: bool = False) -> Lowered:
    """Lowers kernel IR to LLVM IR. This consumes the plan's module. CompileError if a pass fails.

    `bf16` says whether the target has an instruction that rounds to bf16. `streams` says whether data that is read only once
    arrives fastest when it bypasses the second-level cache (see `Target`).
    """
    module = planned.module
    with module.context, ir.Location.unknown():
        _run(module, _lowering(planned, bf16, streams), observer)
        check_lowered(module.operation, planned.schedule)
        attributes = module.operation.attributes
        words = tuple(tuple(ir.IntegerAttr(d).value for d in ir.ArrayAttr(dims)) for dims in ir.ArrayAttr(attributes[WORDS]))
        workspace = ir.IntegerAttr(attributes[WORKSPACE]).value if WORKSPACE in attributes else 0
        tiles = ir.ArrayAttr(attributes[TILE_WORKSPACE]) if TILE_WORKSPACE in attributes else []
        tile_workspace = tuple(ir.IntegerAttr(n).value for n in tiles)
        llvm_ir = translate_to_llvm_ir(module.operation)
        return Lowered(llvm_ir, words, workspace, tile_workspace, None if observer is None else traced(module))


def _planning(schedule: str, bits: int, features: frozenset[str], l1d: int, gathers: bool) -> str:
    if schedule == "reference":
        return f"{_NORMALIZE},forget-hints"
    if is_open(schedule):
        chosen = OPEN_SCHEDULES.get(schedule, "").replace("%d", str(bits)).replace("%c", str(l1d))
        return ",".join(filter(None, (_NORMALIZE, "forget-hints", chosen.replace("%g", str(gathers).lower()))))
    family = "broadcast" if schedule in (CHAIN, SEQUENCE) else schedule
    options = f"schedule={family} bits={bits}{' features=' + '+'.join(sorted(features)) if features else ''}"
    chain = " chain=true" if schedule == CHAIN else ""
    return f"{_NORMALIZE},{_FUSE},choose-format{{{options} l1d={l1d}{chain}}},schedule{{{options}}}"


def _returns_sparse(module: ir.Module) -> bool:
    results = [r for function in public_functions(module) for r in function.type.results]
    return any(ir.RankedTensorType(r).encoding is not None for r in results)


def _lowering(planned: Plan, bf16: bool, streams: bool) -> str:
    schedule, bits, module = planned.schedule, planned.vector_bits, planned.module
    sparsify = _SPARSIFY % (_FREE_OUTGROWN if _returns_sparse(module) else _FREE)
    if schedule == "reference":
        chosen = f"expose-storage,{sparsify},emit-entry"
    elif is_open(schedule):
        options = {"bits": bits, "tiles": planned.tiles, "streams": streams}
        chosen = f"expose-storage{{arrays=true}},{lowering_of(module, schedule, options)},{_FINISH % bits}"
    else:
        if schedule == SEQUENCE:
            own = dict.fromkeys(ir.StringAttr(op.attributes["schedule"]).value for op in walk(module, "kernel.spmm"))
            lowering = ",".join([f"lower-sequence{{bits={bits}}}", *(FAMILIES[name].lowering for name in own)])
        else:
            in_chain = f"allow-approximations,lower-chain{{bf16={str(bf16).lower()} tiles={str(planned.tiles).lower()}}}"
            lowering = in_chain if schedule == CHAIN else FAMILIES[schedule].lowering
        chosen = f"expose-storage,{lowering},{_FINISH % bits}"
    return f"{chosen},lower-to-llvm{{bits={bits} bf16={str(bf16).lower()}}}"


def check_lowered(module: ir.Operation, schedule: str) -> None:
    """Raises CompileError if an op is not of LLVM's dialects: translating it would end the process."""
    for op in all_ops(module)[1:]:
        if not op.name.startswith(("llvm.", "nvvm.")):
            raise CompileError(f"the {schedule} schedule cannot compile the region: {op.name} is left at {op.location}")


def _run(module: ir.Module, pipeline: str, observer: Observer | None) -> None:
    def observe(label: str, after: ir.Module) -> None:
        if observer is not None:
            if label.startswith("lower-chain"):
                share_places(after)
            observer(label.split("{")[0].replace("func.func(", "").rstrip(")"), "mlir", printed(after, label))

    run_pipeline(module, pipeline, observe)
