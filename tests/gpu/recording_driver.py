"""A stand-in for NVIDIA's driver that records what it is called with, through the same C calling convention."""

import ctypes
from collections.abc import Callable
from typing import Any

from gossamer.runtime.cuda import Device, Driver

FUNCTION, CONTEXT, MODULE, LINKER = 0x1000, 0x2000, 0x3000, 0x4000
CUBIN = b"CUBIN of "
"""What machine code begins with here; its PTX follows."""
ATTRIBUTES = {13: 1_980_000, 16: 132, 36: 2_619_000, 37: 5120, 75: 9, 76: 0, 97: 232448}


class RecordingDriver:
    """Has one GPU, like an H100. Its machine code is the PTX after a mark.

    failures  error numbers by function
    log       what the linker says when it fails, and `info` what it says beside that
    calls     what was called that changes anything
    """

    def __init__(self, parameters: int = 0, **failures: int) -> None:
        self.parameters, self.failures = parameters, failures
        self.attributes, self.current = dict(ATTRIBUTES), 0
        self.version = 99000  # what it leaves in the cache on disk, no real driver looks for
        self.log, self.info = b"", b""
        self._logs: tuple[int, int] | None = None
        self._cubin = ctypes.create_string_buffer(0)
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
                self._write_logs()
                return self.failures[name]
            return getattr(self, f"_{name}", lambda *_: None)(*arguments) or 0

        self._kept.append(ctypes.CFUNCTYPE(ctypes.c_int, *types)(called))
        return self._kept[-1]

    def _cuDriverGetVersion(self, out: Any) -> None:
        out[0] = self.version

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

    def _write_logs(self) -> None:
        if self._logs is not None:
            for at, text in zip(self._logs, (self.info, self.log), strict=True):
                ctypes.memmove(at, text + b"\0", len(text) + 1)

    def _cuLinkCreate_v2(self, count: int, options: Any, values: Any, out: Any) -> None:
        assert [options[n] for n in range(count)] == [3, 4, 5, 6] and values[1] == values[3] == 16 << 10
        self._logs, out[0] = (values[0], values[2]), LINKER

    def _cuLinkAddData_v2(self, linker: int, kind: int, data: bytes, size: int, name: bytes, *_: Any) -> None:
        assert (linker, kind, size) == (LINKER, 1, len(data) + 1)
        self._cubin = ctypes.create_string_buffer(CUBIN + data)

    def _cuLinkComplete(self, linker: int, out: Any, size: Any) -> None:
        out[0], size[0] = ctypes.addressof(self._cubin), len(self._cubin) - 1

    def _cuLinkDestroy(self, linker: int) -> None:
        self._logs, self._cubin = None, ctypes.create_string_buffer(0)

    def _cuModuleLoadData(self, out: Any, image: bytes) -> int | None:
        if not image.startswith(CUBIN):
            return 200
        out[0] = MODULE
        return None

    def _cuModuleGetFunction(self, out: Any, module: int, name: bytes) -> None:
        out[0] = FUNCTION

    def _cuLaunchKernel(self, function: int, *rest: Any) -> None:
        parameters = rest[8]
        self.launched = [ctypes.c_int64.from_address(parameters[i]).value for i in range(self.parameters)]

    def _cuGetErrorName(self, code: int, out: Any) -> None:
        out[0] = b"CUDA_ERROR_%d" % code

    def _cuGetErrorString(self, code: int, out: Any) -> None:
        out[0] = b"words about %d" % code
