"""Compiles contract IR to a kernel that can be called on CUDA tensors. Equal kernels are shared, and kept on disk as PTX."""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from gossamer.dialects.errors import FormatError, GossamerError, OptionError
from gossamer.dialects.format import Format
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.passes.gpu.emit_gpu_entry import ALIGNMENT
from gossamer.passes.schedules.families import GPU_FAMILIES
from gossamer.runtime import cuda, disk_cache, ptx
from gossamer.runtime.gpu_kernel import GpuKernel
from gossamer.runtime.ptx import Architecture
from gossamer.runtime.recall import Note
from gossamer.runtime.versions import compiler

log = logging.getLogger("gossamer")

_lock = threading.Lock()
_by_contract: WeakValueDictionary[tuple[str, str, Architecture], "GpuRegionKernel"] = WeakValueDictionary()
_by_key: WeakValueDictionary[str, "GpuRegionKernel"] = WeakValueDictionary()


class GpuRegionKernel:
    """A region's kernels for one architecture of GPUs.

    formats   for each argument of the region's function, the format of its packed operand, None if dense
    schedule  one of GPU_FAMILIES, or an open one
    key       hash of kernel IR and architecture; equal keys mean equal code
    ptx       the code, as text
    dynamic   for each tensor argument of the kernels, the dimensions whose sizes are arguments, too
    """

    def __init__(self, plan: pipelines.Plan | Note, key: str, entry: disk_cache.Entry) -> None:
        self.formats: tuple[Format | Packing | None, ...] = plan.formats
        self.note = Note(key, plan.schedule, plan.formats, tuple(plan.sized), tuple(plan.numbers))
        self.schedule, self.key, self.ptx = plan.schedule, key, entry.code.decode()
        self.launches = {name: Launch.from_json(fields) for name, fields in entry.call["launches"].items()}
        self.dynamic = [tuple(dims) for dims in entry.call["words"]]
        self.kernel = GpuKernel(self.ptx, self.launches, sum(1 + len(dims) for dims in self.dynamic))
        self._words = _word_list(self.dynamic)

    def on(self, device: torch.device) -> "LoadedKernel":
        """Loads the kernels for a GPU. DeviceError if the driver refuses them."""
        return LoadedKernel(self, device)

    def words(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the arguments of a kernel for all its tensors, the output last: address and dynamic sizes of each."""
        return self._words(tensors)


def _word_list(dynamic: Sequence[tuple[int, ...]]) -> Callable[[Sequence[torch.Tensor]], list[int]]:
    """Returns `words` as one flat expression, fast at every call: [t[0].data_ptr(), t[0].shape[0], t[1].data_ptr(), ...]"""
    terms = [word for n, dims in enumerate(dynamic) for word in (f"t[{n}].data_ptr()", *(f"t[{n}].shape[{d}]" for d in dims))]
    function: Callable[[Sequence[torch.Tensor]], list[int]] = eval(f"lambda t: [{', '.join(terms)}]")
    return function


class Stored(Protocol):
    """A sparse operand: its arrays, in the order of the kernels' arguments."""

    @property
    def components(self) -> tuple[torch.Tensor, ...]: ...


class LoadedKernel:
    """A region's kernels on one GPU; the fields are those of `GpuRegionKernel`."""

    def __init__(self, region: GpuRegionKernel, device: torch.device) -> None:
        self.region, self.device, self._index = region, device, device.index or 0
        self.formats, self.schedule, self.key = region.formats, region.schedule, region.key
        region.kernel.load(self._index)

    def __call__(self, operands: Sequence[torch.Tensor | Stored], out: torch.Tensor) -> None:
        """Computes into `out` on torch's current stream, without waiting.

        All tensors are contiguous and have the dtypes of the region. FormatError if one is on another device.
        """
        tensors = [*_tensors(operands), out]
        if wrong := [t.device for t in tensors if t.device != self.device]:
            raise FormatError(f"a kernel for {self.device} was given a tensor on {wrong[0]}: move it there")
        # Torch aligns tensors, but an operand may be a view of another. The allocator reuses a copy in the stream's order.
        aligned = [t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for t in tensors[:-1]]
        words = self.region.words([*aligned, out])
        self.region.kernel.run(words, out.shape[0], self._index, cuda.current_stream(self._index))


def _tensors(operands: Sequence[torch.Tensor | Stored]) -> Iterator[torch.Tensor]:
    for operand in operands:
        yield from (operand,) if isinstance(operand, torch.Tensor) else operand.components


def recall_gpu_region(request: str, architecture: Architecture) -> GpuRegionKernel | None:
    """Returns the kernel that `compile_gpu_region` made for the same request, None if it is no longer in the cache on disk."""
    note = Note.read(_full(request, architecture))
    if note is None:
        return None
    with _lock:
        known = _by_key.get(note.key)
        entry = disk_cache.read(note.key) if known is None else None
        return known if entry is None else _by_key.setdefault(note.key, GpuRegionKernel(note, note.key, entry))


def compile_gpu_region(
    contract: str,
    architecture: Architecture,
    *,
    schedule: str = "gpu-kblock",
    observer: pipelines.Observer | None = None,
    request: str | None = None,
) -> GpuRegionKernel:
    """Returns the kernels of a module of contract IR with one function. Needs no GPU.

    observer(stage, suffix, text) is called for every stage in order. With an observer, the region is always compiled anew.
    `request` is a key by which `recall_gpu_region` finds the kernel again.
    Raises CompileError if a pass or LLVM refuses the region, OptionError for an unknown schedule.
    """
    if schedule not in GPU_FAMILIES and not pipelines.is_open(schedule):
        raise OptionError(f"unknown schedule {schedule!r} for GPUs, there are {', '.join(GPU_FAMILIES)}")
    with _lock:
        kernel = _by_contract.get((contract, schedule, architecture)) if observer is None else None
        if kernel is None:
            kernel = _by_contract[contract, schedule, architecture] = _compile(contract, schedule, architecture, observer)
        if request is not None:
            kernel.note.write(_full(request, architecture))
        return kernel


def _full(request: str, architecture: Architecture) -> str:
    return f"{request}\n{architecture}\n{compiler()}"


def _compile(contract: str, schedule: str, architecture: Architecture, observer: pipelines.Observer | None) -> GpuRegionKernel:
    plan = pipelines.plan(contract, schedule, gpu_pipelines.WARP_BITS, observer)
    key = hashlib.sha256(f"{plan.text}\n{architecture}\n{compiler()}".encode()).hexdigest()[:32]
    if observer is None and (known := _by_key.get(key)) is not None:
        return known
    entry = disk_cache.read(key) if observer is None else None
    if entry is None:
        entry = _code(plan, architecture, observer)
        disk_cache.write(key, entry)
    return _by_key.setdefault(key, GpuRegionKernel(plan, key, entry))


def _code(
    plan: pipelines.Plan, architecture: Architecture, observer: Callable[[str, str, str], None] | None
) -> disk_cache.Entry:
    kernels = gpu_pipelines.lower(plan, observer)
    text = ptx.assemble(kernels.llvm_ir, architecture)
    if observer is not None:
        observer("ptx", "ptx", text)
    launches = {name: launch.as_json() for name, launch in kernels.launches.items()}
    return disk_cache.Entry(text.encode(), {"launches": launches, "words": kernels.words})


@lru_cache(1024)
def loaded_kernel(build: Callable[..., str], given: tuple[Any, ...], schedule: str, place: torch.device) -> LoadedKernel | None:
    """Returns the kernel of the IR `build(*given)`, loaded on a GPU; None if there is none, or the GPU is too old for it."""
    try:
        architecture = Architecture.of_device(*cuda.device(place.index or 0).capability)
        return compile_gpu_region(build(*given), architecture, schedule=schedule).on(place)
    except GossamerError as problem:
        log.info("no %s kernel for %s on %s: %s", schedule, given, place, problem)
        return None
