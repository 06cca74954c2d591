"""A GPU for torch.compile where there is none: tensors stay on the CPU, and sparse kernels run in the emulator.

What differs from a GPU is the type of the tensors' device, the driver and torch's stream. All else is as it would be: what is
decided, compiled, packed, launched and passed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.backend.devices import device as devices
from gossamer.backend.devices.cuda_device import Gpu
from gossamer.runtime import cuda
from gossamer.runtime.operations import OPERATIONS
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.arrays import sorting
from gossamer.sparsity.compiler import op_kernels
from gossamer.sparsity.compiler.gpu_kernels import GpuRegionKernel
from gossamer.sparsity.edges import sorted_edges
from gossamer.sparsity.nn import convolve, sites
from gossamer.sparsity.operations import derivatives, matrix_calls, segments
from gossamer.sparsity.tensor import fast_matmul, fast_sddmm
from tests.gpu.emulated_driver import EmulatedDriver

STREAM = 0x5EED


class EmulatedDevice:
    """The driver behind the device, and what regions ran on it."""

    def __init__(self) -> None:
        self.driver = EmulatedDriver()
        self.device = self.driver.open(0)
        self.schedules: list[str] = []

    @contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """In place of this machine's CPU; AssertionError at the end if a kernel did what it must not."""
        self.schedules.clear()
        self.driver.calls.clear()
        self.driver.fault = None
        words = GpuRegionKernel.words

        def watched(kernel: GpuRegionKernel, tensors: Sequence[Tensor]) -> list[int]:
            self.driver.tensors = list(tensors)
            self.schedules.append(kernel.schedule)
            return words(kernel, tensors)

        patch.setattr(GpuRegionKernel, "words", watched)
        patch.setattr(cuda, "current_stream", lambda index: STREAM)
        patch.setattr(cuda, "_devices", {0: self.device})
        patch.setattr(devices, "_KINDS", {"cpu": lambda place: Gpu(place, self.device)})
        yield
        assert self.driver.fault is None

    @contextmanager
    def operations(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Within `installed`: operations on SparseTensors are those of CUDA tensors, and kernels for CPUs are an error.

        What they make on the default device, and not where their operands are, is on "meta" here, and of no use.
        """
        for room in (matrix_calls, convolve, sites):
            patch.setattr(room, "empty", lambda shape, dtype: torch.empty(shape, dtype=dtype, device="cpu"))
        patch.setattr(sorting, "run", _sorted_by_torch)
        patch.setattr(sites, "_matches", sites.matches_by_bisection)
        for room in (fast_matmul, derivatives, fast_sddmm, sorted_edges):
            patch.setattr(room, "watched", lambda: True)
        patch.setattr(RegionKernel, "__call__", lambda *_: pytest.fail("computed by a kernel for CPUs"))
        patch.setattr(RegionKernel, "into", lambda *_: pytest.fail("computed by a kernel for CPUs"))
        for room in (op_kernels, segments):
            patch.setattr(room, "on_gpu", lambda place: True)
        patch.setattr(op_kernels, "_kernels", {})
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        on_cuda = {name: operation.cuda for name, operation in OPERATIONS.items() if operation.cuda is not None}
        library = torch.library.Library("gossamer", "IMPL")
        try:
            for name, implementation in on_cuda.items():
                library.impl(name, _elsewhere(implementation), "CPU", allow_override=True)
            yield
        finally:
            library._destroy()


def _sorted_by_torch(_op: object, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """In place of the kernel that counts CPU tensors into order: what other devices do."""
    (positions, order), (keys,) = results, operands
    ordered, places = keys.sort(stable=True)
    order.copy_(places)
    numbers = torch.arange(positions.numel(), device=keys.device, dtype=keys.dtype)
    positions.copy_(torch.searchsorted(ordered, numbers))


def _elsewhere(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation, with a default device on which none of its operands is."""

    def call(*given: Any) -> Any:
        with torch.device("meta"):
            return implementation(*given)

    return call


@cache
def emulated_device() -> EmulatedDevice:
    """One for all tests: kernels are loaded once a process."""
    return EmulatedDevice()
