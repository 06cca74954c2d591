"""NVIDIA GPUs, as a `Device` (see device.py)."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from gossamer.backend.devices.cuda_cost import Roofline, uses_tf32
from gossamer.dialects.errors import CompileError, DeviceError
from gossamer.passes.framework.family import Matrix
from gossamer.passes.gpu_pipelines import WARP_BITS
from gossamer.passes.pipelines import Observer
from gossamer.passes.schedules.cost_model import Prediction
from gossamer.passes.schedules.families import GPU_FAMILIES
from gossamer.runtime import cuda
from gossamer.runtime.ptx import Architecture
from gossamer.sparsity.compiler.gpu_kernels import GpuRegionKernel, LoadedKernel, compile_gpu_region, recall_gpu_region

_PASSES = 6
"""How often the bytes of a matrix go through memory while it is evaluated, compared and gathered."""

_WAIT_US = 30.0
"""Microseconds that Python waits for the GPU's comparison."""


class Gpu:
    """A GPU. Kernels are compiled for its architecture, and loaded at once: CUDA cannot load them while it captures a graph."""

    bits = WARP_BITS
    features: frozenset[str] = frozenset()
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    schedules = tuple(GPU_FAMILIES)
    call_us = 0.0
    rounds_to_bf16 = chains = reorders = measures = False
    edge_call = 5e6  # 12 bytes each, in some 20 µs

    def __init__(self, place: torch.device, device: cuda.Device) -> None:
        """`place` is torch's name of the GPU. Raises OptionError if the GPU is too old for the kernels."""
        self._place, self._roofline = place, Roofline.of(device)
        self._architecture = Architecture.of_device(*device.capability)
        self.target = f"{place} {self._architecture.name}"

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=self._place)

    def predict(self, matrix: Matrix, tokens: int | None) -> Prediction:
        return self._roofline.predict(matrix, tokens, uses_tf32())

    def terms(self, matrix: Matrix, tokens: int, schedule: str) -> Mapping[str, float]:
        return {}

    def transpose_us(self, size: int) -> float:
        return 2 * size / self._roofline.bytes

    def renewal_us(self, elements: int) -> float:
        return _WAIT_US + _PASSES * 4 * elements / self._roofline.bytes

    def recall(self, request: str) -> LoadedKernel | None:
        known = recall_gpu_region(request, self._architecture)
        return None if known is None else self._loaded(known)

    def compile(self, contract: str, schedule: str, observer: Observer | None, request: str) -> LoadedKernel:
        made = compile_gpu_region(contract, self._architecture, schedule=schedule, observer=observer, request=request)
        return self._loaded(made)

    def _loaded(self, kernel: GpuRegionKernel) -> LoadedKernel:
        try:
            return kernel.on(self._place)
        except DeviceError as problem:
            raise CompileError(str(problem)) from problem


@lru_cache
def gpu(place: torch.device) -> Gpu:
    """Returns the GPU of a device such as cuda:1. Raises DeviceError without a driver, OptionError if the GPU is too old."""
    return Gpu(place, cuda.device(place.index or 0))
