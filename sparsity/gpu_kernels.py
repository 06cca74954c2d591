"""Contract IR to a kernel that can be called on CUDA tensors; equal kernels are shared, and kept on disk as PTX."""

import hashlib
import threading
from collections.abc import Callable, Sequence

import torch

from gossamer.dialects.errors import FormatError, OptionError
from gossamer.dialects.format import Format
from gossamer.dialects.launch import Launch
from gossamer.dialects.packing import Packing
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.passes.emit_gpu_entry import ALIGNMENT
from gossamer.passes.families import GPU_FAMILIES
from gossamer.runtime import disk_cache, ptx
from gossamer.runtime.gpu_kernel import GpuKernel
from gossamer.runtime.packing import Packed
from gossamer.runtime.ptx import Architecture
from gossamer.sparsity.kernels import compiler

_lock = threading.Lock()
_by_contract: dict[tuple[str, str, Architecture], "GpuRegionKernel"] = {}
_by_key: dict[str, "GpuRegionKernel"] = {}


class GpuRegionKernel:
    """A region's kernels for one architecture of GPUs.

    formats   one entry per argument of the region's function: how its packed operand must be stored, None if dense
    schedule  one of GPU_FAMILIES
    key       hash of kernel IR and architecture: equal keys are the same code
    ptx       the code, as text
    dynamic   for each tensor that its kernels take, the dimensions whose size they are passed
    """

    def __init__(self, plan: pipelines.Plan, key: str, entry: disk_cache.Entry) -> None:
        self.formats: tuple[Format | Packing | None, ...] = plan.formats
        self.schedule, self.key, self.ptx = plan.schedule, key, entry.code.decode()
        self.launches = {name: Launch.from_json(fields) for name, fields in entry.call["launches"].items()}
        self.dynamic = [tuple(dims) for dims in entry.call["words"]]
        self.kernel = GpuKernel(self.ptx, self.launches, sum(1 + len(dims) for dims in self.dynamic))

    def __call__(self, operands: Sequence[torch.Tensor | Packed], out: torch.Tensor) -> None:
        """Compute into `out` on the current stream of its device, without waiting.

        Dense tensors are contiguous, of the types the region was compiled for, and on the same device as packed ones and out.
        """
        device = out.device
        if device.type != "cuda":
            raise FormatError(f"kernels for GPUs need CUDA tensors, the result is on {device}")
        tensors = [t for operand in operands for t in (operand.components if isinstance(operand, Packed) else (operand,))]
        if wrong := next((t for t in tensors if t.device != device), None):
            raise FormatError(f"all operands must be on {device}, one is on {wrong.device}")
        # The caching allocator aligns to 512 bytes, but a tensor may be a part of another.
        aligned = [t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for t in tensors]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        self.kernel.run(self.words([*aligned, out]), out.shape[0], device.index, stream)

    def words(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """What a kernel is passed for all its tensors, the output last: address and dynamic sizes of each."""
        return [
            word
            for tensor, dims in zip(tensors, self.dynamic, strict=True)
            for word in (tensor.data_ptr(), *(tensor.shape[d] for d in dims))
        ]


def compile_gpu_region(
    contract: str, architecture: Architecture, *, schedule: str = "gpu-kblock", observer: pipelines.Observer | None = None
) -> GpuRegionKernel:
    """The kernels of a module of contract IR with one function. Needs no GPU.

    observer(stage, suffix, text) is called for every stage in order and makes the region be compiled anew.
    Raises CompileError if a pass or LLVM refuses the region, OptionError for an unknown schedule.
    """
    if schedule not in GPU_FAMILIES:
        raise OptionError(f"unknown schedule {schedule!r} for GPUs, there are {', '.join(GPU_FAMILIES)}")
    with _lock:
        known = _by_contract.get((contract, schedule, architecture)) if observer is None else None
        if known is None:
            known = _by_contract[contract, schedule, architecture] = _compile(contract, schedule, architecture, observer)
        return known


def _compile(contract: str, schedule: str, architecture: Architecture, observer: pipelines.Observer | None) -> GpuRegionKernel:
    plan = pipelines.plan(contract, schedule, gpu_pipelines.WARP_BITS, observer)
    key = hashlib.sha256(f"{plan.text}\n{architecture}\n{compiler()}".encode()).hexdigest()[:32]
    if observer is None and key in _by_key:
        return _by_key[key]
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
