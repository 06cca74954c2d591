"""Contract IR to a callable kernel: the passes plan and lower it, the runtime turns it into code, equal kernels are shared."""

import hashlib
import threading
from collections.abc import Sequence

import torch

from gossamer.dialects.errors import CompileError, OptionError
from gossamer.dialects.format import Format
from gossamer.passes import pipelines
from gossamer.runtime import jit
from gossamer.runtime.kernel import Kernel
from gossamer.runtime.packing import Packed
from gossamer.runtime.target import Target, host

_lock = threading.Lock()
_by_contract: dict[tuple[str, str, Target], "RegionKernel"] = {}
_by_key: dict[str, "RegionKernel"] = {}


class RegionKernel:
    """A region's kernel.

    formats   one entry per argument of the region's function: the format its packed operand must have, None if dense
    schedule  "kblock" or "reference"
    key       hash of kernel IR and target: equal keys are the same machine code
    """

    def __init__(self, plan: pipelines.Plan, key: str, lowered: pipelines.Lowered, code: jit.Code) -> None:
        self.formats: tuple[Format | None, ...] = plan.formats
        self.schedule, self.key = plan.schedule, key
        self._kernel = Kernel(code, sum(1 + len(dims) for dims in lowered.words[:-2]), lowered.workspace)
        self._operand_dims = _dense_dims(plan.formats, lowered.words)
        self._out_dims = lowered.words[-3]

    def __call__(self, operands: Sequence[torch.Tensor | Packed], out: torch.Tensor) -> None:
        """Compute into `out`; dense tensors are contiguous CPU tensors of the types the region was compiled for."""
        words: list[int] = []
        for operand, dims in zip(operands, self._operand_dims, strict=True):
            if isinstance(operand, Packed):
                words += operand.words
            else:
                words.append(operand.data_ptr())
                for d in dims:
                    words.append(operand.size(d))
        words.append(out.data_ptr())
        for d in self._out_dims:
            words.append(out.size(d))
        self._kernel.run(words)


def _dense_dims(formats: Sequence[Format | None], words: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The dynamic dimensions of each dense operand; a sparse one brings its words along."""
    remaining = iter(words)
    dims = []
    for format in formats:
        own = [next(remaining) for _ in format.components()] if format else [next(remaining)]
        dims.append(() if format else own[0])
    return tuple(dims)


def compile_region(
    contract: str, *, schedule: str = "auto", observer: pipelines.Observer | None = None, target: Target | None = None
) -> RegionKernel:
    """The kernel for a module of contract IR with one function, for this machine unless a target is given.

    observer(stage, suffix, text) is called for every stage in order and makes the region be compiled anew.
    Raises CompileError if a pass or LLVM refuses the region, OptionError for an unknown schedule.
    """
    if schedule not in ("auto", *pipelines.SCHEDULES):
        raise OptionError(f"unknown schedule {schedule!r}, there are auto, {', '.join(pipelines.SCHEDULES)}")
    target = target or host()
    with _lock:
        known = _by_contract.get((contract, schedule, target)) if observer is None else None
        if known is None:
            known = _by_contract[contract, schedule, target] = _compile(contract, schedule, observer, target)
        return known


def _compile(contract: str, schedule: str, observer: pipelines.Observer | None, target: Target) -> RegionKernel:
    try:
        plan = pipelines.plan(contract, "kblock" if schedule == "auto" else schedule, target.vector_bits, observer)
    except CompileError:
        if schedule != "auto":
            raise
        plan = pipelines.plan(contract, "reference", target.vector_bits, observer)
    key = hashlib.sha256(f"{plan.text}\n{target}".encode()).hexdigest()[:16]
    if observer is None and key in _by_key:
        return _by_key[key]
    lowered = pipelines.lower(plan, target.rounds_to_bf16, observer)
    module = jit.optimize(lowered.llvm_ir, target)
    if observer is not None:
        observer("llvm", "ll", str(module))
        observer("assembly", "s", jit.assembly(module, target))
    kernel = RegionKernel(plan, key, lowered, jit.load(module, target, lowered.entry))
    return _by_key.setdefault(key, kernel)
