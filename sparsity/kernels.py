"""Contract IR to a callable kernel: the passes plan and lower it, the runtime makes code of it, equal kernels are shared."""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from gossamer import dialects, passes, runtime
from gossamer.dialects.errors import CompileError, OptionError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.passes import pipelines
from gossamer.passes.emit_entry import ENTRY
from gossamer.runtime import disk_cache, jit
from gossamer.runtime.kernel import Kernel
from gossamer.runtime.packing import Packed
from gossamer.runtime.target import Target, host
from gossamer.sparsity.recall import Note

log = logging.getLogger("gossamer")

_lock = threading.Lock()
_by_contract: dict[tuple[str, str, Target], "RegionKernel"] = {}
_by_key: dict[str, "RegionKernel"] = {}


_Words = Callable[[Sequence[torch.Tensor | Packed | int], torch.Tensor | Sequence[torch.Tensor]], list[int]]


class RegionKernel:
    """A region's kernel.

    formats   one entry per argument of the region's function: how its packed operand must be stored, None if dense
    schedule  one of pipelines.SCHEDULES or OPEN_SCHEDULES
    key       hash of kernel IR and target: equal keys are the same machine code
    """

    def __init__(self, plan: pipelines.Plan | Note, key: str, entry: disk_cache.Entry) -> None:
        self.formats: tuple[Format | Packing | None, ...] = plan.formats
        self.note = Note(key, plan.schedule, plan.formats, tuple(plan.sized), tuple(plan.numbers))
        self.schedule, self.key = plan.schedule, key
        *dynamic, _workspace, _threads = entry.call["words"]
        code = jit.load(entry.code, ENTRY)
        self._kernel = Kernel(code, sum(1 + len(dims) for dims in dynamic), entry.call["workspace"])
        self._words = _word_list(plan.formats, plan.sized, plan.numbers, dynamic)
        self._tiles = tuple(entry.call["tile_workspace"])

    def __reduce__(self) -> tuple[Callable[[Note], "RegionKernel"], tuple[Note]]:
        return _recalled, (self.note,)

    def __call__(self, operands: Sequence[torch.Tensor | Packed | int], out: torch.Tensor, length: int = 0) -> None:
        """Compute into `out`; dense tensors are contiguous CPU tensors of the types the region was compiled for.

        `length` is that of a sequence where the region has attention.

        A region with a sparse result fills `out` (int64) with address and elements of each of its arrays, for the caller to
        free (see expose-specifiers).
        """
        if not self._tiles:
            self._kernel.run(self._words(operands, out))
            return
        tokens, shared, scratch = self._tiles
        length = length or out.size(0)
        tiles = -(-length // tokens)
        self._kernel.run(self._words(operands, out), out.size(0) // length * tiles * shared, tiles * scratch)

    def into(self, outputs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor | Packed | int]) -> None:
        """Compute all results of a region, which may have several."""
        self._kernel.run(self._words(operands, outputs if len(outputs) > 1 else outputs[0]))


def _word_list(
    formats: Sequence[Format | Packing | None],
    sized: Sequence[bool],
    numbers: Sequence[bool],
    dynamic: Sequence[tuple[int, ...]],
) -> _Words:
    """A function from operands and output (or outputs) to the words of a call: one flat expression, for it runs at every call.

    [o[0].data_ptr(), o[0].shape[0], *o[1].words, o[2].data_ptr(), out.data_ptr(), out.shape[0]]

    The words of a sparse operand are its arrays' and, where its shape is open, the sizes of its levels.
    """
    remaining = iter(dynamic)
    terms: list[str] = []
    for position, format in enumerate(formats):
        name = f"o[{position}]"
        if position < len(numbers) and numbers[position]:
            terms.append(name)
            next(remaining)
        elif format is None:
            terms += _dense_words(name, next(remaining))
        else:
            terms.append(f"*{name}.words")
            sizes = len(format.levels) if isinstance(format, Format) and sized[position] else 0
            for _ in range(len(format.components()) + sizes):
                next(remaining)
    outputs = list(remaining)
    for number, open_dims in enumerate(outputs):
        terms += _dense_words("out" if len(outputs) == 1 else f"out[{number}]", open_dims)
    function: _Words = eval(f"lambda o, out: [{', '.join(terms)}]")
    return function


def _dense_words(name: str, open_dims: Sequence[int]) -> list[str]:
    return [f"{name}.data_ptr()", *(f"{name}.shape[{dim}]" for dim in open_dims)]


def _recalled(note: Note) -> RegionKernel:
    """The kernel of a note, as unpickling wants it."""
    with _lock:
        kernel = _by_key.get(note.key) or _from_disk(note, note.key)
    if kernel is None:
        raise CompileError(f"the code of kernel {note.key} is not in the cache on disk any more")
    return kernel


def recall_region(request: str, target: Target | None = None) -> RegionKernel | None:
    """The kernel that `compile_region` made for the same request before, if code and plan are still in the cache on disk.

    `request` is any text that determines the contract IR and the schedule.
    """
    note = Note.read(_full(request, target or host()))
    if note is None:
        return None
    with _lock:
        return _by_key.get(note.key) or _from_disk(note, note.key)


def compile_region(
    contract: str,
    *,
    schedule: str = "auto",
    observer: pipelines.Observer | None = None,
    target: Target | None = None,
    request: str | None = None,
) -> RegionKernel:
    """The kernel for a module of contract IR with one function, for this machine unless a target is given.

    observer(stage, suffix, text) is called for every stage in order and makes the region be compiled anew.
    `request` is what `recall_region` will ask for.
    Raises CompileError if a pass or LLVM refuses the region, OptionError for an unknown schedule.
    """
    if schedule not in ("auto", pipelines.CHAIN, *pipelines.SCHEDULES, *pipelines.OPEN_SCHEDULES):
        raise OptionError(f"unknown schedule {schedule!r}, there are auto, {', '.join(pipelines.SCHEDULES)}")
    target = target or host()
    with _lock:
        known = _by_contract.get((contract, schedule, target)) if observer is None else None
        if known is None:
            known = _by_contract[contract, schedule, target] = _choose(contract, schedule, observer, target)
        if request is not None:
            known.note.write(_full(request, target))
        return known


def _full(request: str, target: Target) -> str:
    return f"{request}\n{target}\n{compiler()}"


def _choose(contract: str, schedule: str, observer: pipelines.Observer | None, target: Target) -> RegionKernel:
    """ "auto" is "kblock", and "reference" for what that cannot compute."""
    if schedule != "auto":
        return _compile(contract, schedule, observer, target)
    try:
        return _compile(contract, "kblock", observer, target)
    except CompileError:
        return _compile(contract, "reference", observer, target)


def _compile(contract: str, schedule: str, observer: pipelines.Observer | None, target: Target) -> RegionKernel:
    plan = pipelines.plan(contract, schedule, target.vector_bits, observer, target.instructions)
    key = hashlib.sha256(f"{plan.text}\n{target}\n{compiler()}".encode()).hexdigest()[:32]
    if observer is None and key in _by_key:
        return _by_key[key]
    kernel = _from_disk(plan, key) if observer is None else None
    if kernel is None:
        entry = _machine_code(plan, target, observer)
        disk_cache.write(key, entry)
        kernel = _by_key.setdefault(key, RegionKernel(plan, key, entry))
    return kernel


def _from_disk(plan: pipelines.Plan | Note, key: str) -> RegionKernel | None:
    """The kernel whose code is on disk; None if it is not there, or cannot be linked."""
    entry = disk_cache.read(key)
    if entry is None:
        return None
    try:
        return _by_key.setdefault(key, RegionKernel(plan, key, entry))
    except (CompileError, KeyError, TypeError, ValueError) as problem:
        log.warning("kernel cache: the code of %s cannot be used (%s), it is compiled anew", key, problem)
        return None


@cache
def compiler() -> str:
    """What turns kernel IR into code: the versions of MLIR and LLVM, and a hash of our own source, which a version does not
    pin down while it is worked on."""
    source = source_hash(*(room.__path__[0] for room in (dialects, passes, runtime)))
    return f"torch-mlir {version('torch-mlir')} llvmlite {version('llvmlite')} gossamer {source}"


@cache
def source_hash(*directories: str) -> str:
    """A hash of the Python files in some directories."""
    files = (path for directory in directories for path in sorted(Path(directory).glob("*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _machine_code(plan: pipelines.Plan, target: Target, observer: pipelines.Observer | None) -> disk_cache.Entry:
    lowered = pipelines.lower(plan, target.rounds_to_bf16, observer)
    module = jit.optimize(lowered.llvm_ir, target)
    if observer is not None:
        observer("llvm", "ll", str(module))
        observer("assembly", "s", jit.assembly(module, target))
    call = {"words": lowered.words, "workspace": lowered.workspace, "tile_workspace": lowered.tile_workspace}
    return disk_cache.Entry(jit.object_code(module, target), call)
