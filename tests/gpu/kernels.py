"""Regions compiled for GPUs and run in the emulator."""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.launch import Launch
from gossamer.passes import gpu_pipelines, pipelines
from gossamer.runtime.packing import Packed, pack
from gossamer.runtime.ptx import Architecture, assemble
from tests.contracts import Region
from tests.gpu.emulator import GlobalMemory, launch, parse
from tests.gpu.int8_region import Int8Region


@dataclass(frozen=True)
class Compiled:
    """A region's PTX, and what its plan says about arguments and launches."""

    region: Region | Int8Region
    plan: pipelines.Plan
    kernels: gpu_pipelines.GpuKernels
    ptx: str

    @property
    def launches(self) -> dict[str, Launch]:
        """By the last part of the kernel's name: t128."""
        return {name.rpartition("_")[2]: launch for name, launch in self.kernels.launches.items()}


@cache
def compiled(region: Region | Int8Region, schedule: str, capability: int = 90) -> Compiled:
    """The region's kernels of one schedule."""
    plan = pipelines.plan(region.text(), schedule, gpu_pipelines.WARP_BITS)
    kernels = gpu_pipelines.lower(plan)
    return Compiled(region, plan, kernels, assemble(kernels.llvm_ir, Architecture(capability)))


def emulate(
    kernels: Compiled,
    variant: str,
    x: Tensor,
    w: Tensor,
    extras: list[Tensor],
    *,
    seed: int | None = None,
    ptx: str | None = None,
) -> Tensor:
    """The result of one of the region's kernels for these operands; `ptx` stands in for the region's own."""
    *formats, sparse = [f for f in kernels.plan.formats if f is not None]
    assert not formats
    packed = pack(w, sparse)
    out = torch.full((x.shape[0], kernels.region.m), float("nan"), dtype=kernels.region.dtype)
    tensors = [t for operand in (x, packed, *extras, out) for t in _arrays(operand)]
    return run(kernels.kernels, ptx or kernels.ptx, variant, tensors, seed)


def run(kernels: gpu_pipelines.GpuKernels, ptx: str, variant: str, tensors: list[Tensor], seed: int | None = None) -> Tensor:
    """What a kernel, given by the last part of its name, leaves in the last of its tensors."""
    memory, arguments = GlobalMemory(), list[int]()
    for tensor, dims in zip(tensors, kernels.words, strict=True):
        arguments += [memory.place(_bits(tensor)), *(tensor.shape[d] for d in dims)]
        last = arguments[-1 - len(dims)]
    (name,) = (name for name in kernels.launches if name.endswith(f"_{variant}"))
    plan, out = kernels.launches[name], tensors[-1]
    conflicts = launch(
        parse(ptx)[name],
        memory,
        grid=plan.grid(out.shape[0]),
        block=plan.threads,
        arguments=arguments,
        shared=plan.shared,
        seed=seed,
    )
    assert conflicts == 0, f"{conflicts} bank conflicts"
    return torch.from_numpy(memory.read(last)).view(out.dtype)


def _arrays(operand: Tensor | Packed) -> list[Tensor]:
    return list(operand.components) if isinstance(operand, Packed) else [operand]


def _bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy()


def planted(ptx: str, pattern: str, replacement: str, number: int = 0, start: int | None = None) -> str:
    """The text with the number-th match of a pattern from `start` on replaced, by default in its last kernel."""
    start = ptx.rindex(".visible .entry") if start is None else start
    match = list(re.finditer(pattern, ptx[start:]))[number]
    return ptx[: start + match.start()] + match.expand(replacement) + ptx[start + match.end() :]


def no_generic_access(ptx: str) -> bool:
    """Whether all loads and stores say which memory they mean, and nothing is called or kept in local memory."""
    return not re.search(r"\b(ld|st)\.(v\d\.)?[bfu]\d+|call\b|\.local", ptx)
