"""A driver whose GPU is the emulator, and whose memory is that of tensors on the CPU: kernels run as they are launched."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tests.gpu.emulator import Fault, Program, launch, parse
from tests.gpu.emulator.memory import Array
from tests.gpu.recording_driver import CUBIN, RecordingDriver


class HostMemory:
    """The memory of some tensors, at their addresses in this process."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = [
            (t.data_ptr(), np.ctypeslib.as_array((ctypes.c_uint8 * t.nbytes).from_address(t.data_ptr())))
            for t in tensors
            if t.nbytes
        ]

    def load(self, at: Array, size: int) -> Array:
        """[threads, size] bytes."""
        data = np.zeros((at.size, size), np.uint8)
        for threads, places, part in self._found(at, size):
            data[threads] = part[places]
        return data

    def store(self, at: Array, data: Array) -> None:
        """The inverse of load."""
        for threads, places, part in self._found(at, data.shape[1]):
            part[places] = data[threads]

    def _found(self, at: Array, size: int) -> list[tuple[Array, Array, Array]]:
        found, left = [], np.ones(at.size, bool)
        for start, part in self._parts:
            inside = left & (at >= start) & (at + size <= start + part.size)
            if inside.any():
                found.append((inside, (at[inside] - start)[:, None] + np.arange(size), part))
                left &= ~inside
        if left.any() or (at % size).any():
            raise Fault("access outside of any tensor, or misaligned")
        return found


class EmulatedDriver(RecordingDriver):
    """Runs what is launched on the memory of `tensors`. A fault of a kernel is kept: C lets no exception through."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.tensors = tensors
        self.fault: Fault | None = None
        self._modules: list[dict[str, Program]] = []
        self._functions: list[Program] = []

    def launched_names(self) -> list[str]:
        """The kernels that were launched, in order."""
        return [self._functions[call[1] - 1].name for call in self.named("cuLaunchKernel")]

    def _cuModuleLoadData(self, out: Any, image: bytes) -> int | None:
        self._modules.append(parse(image.removeprefix(CUBIN).decode()))
        out[0] = len(self._modules)
        return None

    def _cuModuleGetFunction(self, out: Any, module: int, name: bytes) -> None:
        self._functions.append(self._modules[module - 1][name.decode()])
        out[0] = len(self._functions)

    def _cuLaunchKernel(self, function: int, grid: int, *rest: Any) -> None:
        program, (_, _, block, _, _, shared, *_) = self._functions[function - 1], rest
        self.parameters = len(program.parameters)
        super()._cuLaunchKernel(function, grid, *rest)
        try:
            launch(program, HostMemory(self.tensors), grid=grid, block=block, arguments=self.launched, shared=shared)
        except Fault as fault:
            self.fault = fault
