"""A driver whose GPU is the emulator, and whose memory is that of tensors on the CPU: kernels run as they are launched."""

import ctypes
from typing import Any

import numpy as np
from torch import Tensor

from tests.gpu.emulator import Fault, launch, parse
from tests.gpu.emulator.memory import Array
from tests.gpu.recording_driver import RecordingDriver


class HostMemory:
    """The memory of some tensors, at their addresses in this process."""

    def __init__(self, tensors: list[Tensor]) -> None:
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
        found, left = [], at.size
        for start, part in self._parts:
            inside = (at >= start) & (at + size <= start + part.size)
            if inside.any():
                found.append((inside, (at[inside] - start)[:, None] + np.arange(size), part))
                left -= int(inside.sum())
        if left or (at % size).any():
            raise Fault("access outside of any tensor, or misaligned")
        return found


class EmulatedDriver(RecordingDriver):
    """Runs what is launched, with `words` parameters, on the memory of `tensors`."""

    def __init__(self, ptx: str, words: int, tensors: list[Tensor]) -> None:
        super().__init__(words)
        self._programs, self._memory = parse(ptx), HostMemory(tensors)
        self._loaded: list[str] = []
        self.fault: Fault | None = None

    def _cuModuleGetFunction(self, out: Any, module: int, name: bytes) -> None:
        self._loaded.append(name.decode())
        out[0] = len(self._loaded)

    def _cuLaunchKernel(self, function: int, grid: int, *rest: Any) -> None:
        super()._cuLaunchKernel(function, grid, *rest)
        program, (_, _, block, _, _, shared, *_) = self._programs[self._loaded[function - 1]], rest
        try:
            launch(program, self._memory, grid=grid, block=block, arguments=self.launched, shared=shared)
        except Fault as fault:  # an exception would not come through C
            self.fault = fault
