"""A GPU for torch.compile where there is none: tensors stay on the CPU, and sparse kernels run in the emulator.

What differs from a GPU is the type of the tensors' device, the driver and torch's stream. All else is as it would be: what is
decided, compiled, packed, launched and passed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import pytest
from torch import Tensor

from gossamer.backend import device as devices
from gossamer.backend.cuda_device import Gpu
from gossamer.runtime import cuda
from gossamer.sparsity.gpu_kernels import GpuRegionKernel
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


@cache
def emulated_device() -> EmulatedDevice:
    """One for all tests: kernels are loaded once a process."""
    return EmulatedDevice()
