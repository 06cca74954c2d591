"""A stand-in for NVIDIA's driver that records what it is called with, through the same C calling convention."""

import ctypes
from collections.abc import Callable
from typing import Any

from gossamer.runtime.cuda import Device, Driver

FUNCTION, CONTEXT, MODULE = 0x1000, 0x2000, 0x3000
ATTRIBUTES = {13: 1_980_000, 16: 132, 36: 2_619_000, 37: 5120, 75: 9, 76: 0, 97: 232448}


class RecordingDriver:
    """Has one GPU, like an H100. `failures` are error numbers by function; `calls` what was called that changes anything."""

    def __init__(self, parameters: int = 0, **failures: int) -> None:
        self.parameters, self.failures = parameters, failures
        self.attributes, self.log, self.current = dict(ATTRIBUTES), b"", 0
        self.calls: list[tuple[Any, ...]] = []
        self.launched: list[int] = []
        self._kept: list[Callable[..., int]] = []
        self.driver = Driver(self._function)

    def open(self, index: int) -> Device:
        """The device of a number."""
        return Device.open(index, self.driver)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of some functions."""
        return [call for call in self.calls if call[0] in names]

    def _function(self, name: str, types: tuple[Any, ...]) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            if name in self.failures:
                if name == "cuModuleLoadDataEx":
                    ctypes.memmove(arguments[4][2], self.log + b"\0", len(self.log) + 1)
                return self.failures[name]
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 0

        self._kept.append(ctypes.CFUNCTYPE(ctypes.c_int, *types)(called))
        return self._kept[-1]

    def _cuDriverGetVersion(self, out: Any) -> None:
        out[0] = 13000

    def _cuDeviceGet(self, out: Any, index: int) -> None:
        out[0] = index

    def _cuDeviceGetName(self, out: Any, size: int, device: int) -> None:
        pass

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> None:
        out[0] = self.attributes[attribute]

    def _cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out[0] = CONTEXT + device

    def _cuCtxGetCurrent(self, out: Any) -> None:
        out[0] = self.current

    def _cuModuleLoadDataEx(self, out: Any, image: bytes, count: int, options: Any, values: Any) -> None:
        out[0] = MODULE

    def _cuModuleGetFunction(self, out: Any, module: int, name: bytes) -> None:
        out[0] = FUNCTION

    def _cuLaunchKernel(self, function: int, *rest: Any) -> None:
        parameters = rest[8]
        self.launched = [ctypes.c_int64.from_address(parameters[i]).value for i in range(self.parameters)]

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        out[0] = b"CUDA_ERROR_%d" % code

    def _cuGetErrorString(self, code: int, out: Any) -> None:
        out[0] = b"words about %d" % code
