"""Calls NVIDIA's driver through ctypes, and describes its devices. The library is loaded at the first use.

Kernels run in a device's primary context, as PyTorch's do, on a stream that the caller gives.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from gossamer.dialects.errors import DeviceError

_Pointer = ctypes.c_void_p
_Out = ctypes.POINTER(ctypes.c_void_p)
_Int, _IntOut, _Word = ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_uint
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_Word,),
    "cuDriverGetVersion": (_IntOut,),
    "cuDeviceGet": (_IntOut, _Int),
    "cuDeviceGetName": (ctypes.c_char_p, _Int, _Int),
    "cuDeviceGetAttribute": (_IntOut, _Int, _Int),
    "cuDevicePrimaryCtxRetain": (_Out, _Int),
    "cuCtxGetCurrent": (_Out,),
    "cuCtxPushCurrent_v2": (_Pointer,),
    "cuCtxPopCurrent_v2": (_Out,),
    "cuLinkCreate_v2": (_Word, ctypes.POINTER(_Int), _Out, _Out),
    "cuLinkAddData_v2": (_Pointer, _Int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, _Word, _Pointer, _Pointer),
    "cuLinkComplete": (_Pointer, _Out, ctypes.POINTER(ctypes.c_size_t)),
    "cuLinkDestroy": (_Pointer,),
    "cuModuleLoadData": (_Out, ctypes.c_char_p),
    "cuModuleGetFunction": (_Out, _Pointer, ctypes.c_char_p),
    "cuFuncSetAttribute": (_Pointer, _Int, _Int),
    "cuLaunchKernel": (_Pointer, *[_Word] * 7, _Pointer, _Out, _Pointer),
    "cuGetErrorName": (_Int, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (_Int, ctypes.POINTER(ctypes.c_char_p)),
}
# Numbers of cuda.h.
_CLOCK_KHZ, _MULTIPROCESSORS, _MEMORY_KHZ, _BUS_BITS, _MAJOR, _MINOR, _SHARED = 13, 16, 36, 37, 75, 76, 97
_LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"


class Driver:
    """The driver's functions. They raise DeviceError instead of returning the number of an error.

    function  function(name, argument types) returns the C function; tests give another one
    """

    def __init__(self, function: Callable[[str, tuple[Any, ...]], Callable[..., int]]) -> None:
        self._functions = {name: function(name, types) for name, types in PROTOTYPES.items()}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function. Raises DeviceError with the driver's text if it fails."""
        if code := self._functions[name](*arguments):
            raise DeviceError(f"{name} failed: {self.error(code)}")

    def error(self, code: int) -> str:
        """Returns name and description of the error with this number."""
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            self._functions[function](code, ctypes.byref(text))
            texts.append((text.value or b"unknown").decode())
        return f"{texts[0]} ({texts[1]})"

    def try_call(self, name: str, *arguments: Any) -> int:
        """Calls a function. Returns the number of its error, 0 for none."""
        return self._functions[name](*arguments)

    @cached_property
    def version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports, such as (12, 8)."""
        number = self.integer("cuDriverGetVersion")
        return number // 1000, number % 1000 // 10

    def integer(self, name: str, *arguments: Any) -> int:
        """Returns the number that a function stores at its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def handle(self, name: str, *arguments: Any) -> int:
        """Returns the handle that a function stores at its first argument; 0 for none."""
        value = ctypes.c_void_p()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value or 0


@cache
def driver() -> Driver:
    """Returns the driver of this machine. Raises DeviceError if there is none."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as problem:
        raise DeviceError(f"there is no NVIDIA driver on this machine: {problem}. Keep the model on the CPU.") from None

    def function(name: str, types: tuple[Any, ...]) -> Callable[..., int]:
        try:
            found = getattr(library, name)
        except AttributeError:
            raise DeviceError(f"the NVIDIA driver is too old: {_LIBRARY} has no {name}. Update it.") from None
        found.argtypes, found.restype = types, ctypes.c_int
        return found

    return Driver(function)


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU: its number, and the facts that Gossamer needs to make and choose kernels.

    shared       bytes of shared memory that a thread block may have
    clock_mhz    highest clock of a multiprocessor, in cycles a microsecond
    bytes_a_us   highest memory bandwidth, in bytes a microsecond
    """

    driver: Driver
    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    clock_mhz: float
    bytes_a_us: float
    context: int

    @classmethod
    def open(cls, index: int, driver: Driver) -> "Device":
        """Returns the GPU that torch calls cuda:index."""
        number = driver.integer("cuDeviceGet", index)
        attribute = lambda which: driver.integer("cuDeviceGetAttribute", which, number)
        name = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", name, len(name), number)
        context = driver.handle("cuDevicePrimaryCtxRetain", number)
        capability = attribute(_MAJOR), attribute(_MINOR)
        bandwidth = 2 * attribute(_MEMORY_KHZ) / 1e3 * attribute(_BUS_BITS) / 8  # two transfers a cycle
        return cls(
            driver, index, name.value.decode(), capability, attribute(_MULTIPROCESSORS), attribute(_SHARED),
            attribute(_CLOCK_KHZ) / 1e3, bandwidth, context,
        )  # fmt: skip

    def within(self, action: Callable[[], None]) -> None:
        """Runs `action` with the device's context current in this thread."""
        if self.driver.handle("cuCtxGetCurrent") == self.context:
            action()
            return
        self.driver.call("cuCtxPushCurrent_v2", self.context)
        try:
            action()
        finally:
            self.driver.handle("cuCtxPopCurrent_v2")

    def __str__(self) -> str:
        return f"cuda:{self.index} ({self.name}, compute capability {'.'.join(map(str, self.capability))})"


_devices: dict[int, Device] = {}
_lock = threading.Lock()


def device(index: int) -> Device:
    """Returns the GPU that torch calls cuda:index. Raises DeviceError if there is no driver or no such GPU."""
    found = _devices.get(index)
    if found is None:
        with _lock:
            found = _devices.setdefault(index, Device.open(index, driver()))
    return found


@cache
def _raw_stream() -> Callable[[int], int]:
    from gossamer.runtime.torch_internals import cuda_raw_stream  # only a torch with CUDA has it

    return cuda_raw_stream


def current_stream(index: int) -> int:
    """Returns the handle of torch's current stream on cuda:index."""
    handle: int = _raw_stream()(index)
    return handle
