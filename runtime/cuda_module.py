"""Loads PTX on one GPU. The driver links it to machine code (a cubin) once; the next process loads the cubin from disk.

    PTX  →  cuLinkCreate, cuLinkAddData, cuLinkComplete  →  cubin  →  cuModuleLoadData  →  functions

An entry of the cache belongs to a compute capability and a driver's CUDA version. If this driver refuses an entry, it links the
PTX again.
"""

import ctypes
import hashlib
import logging

from gossamer.dialects.errors import DeviceError
from gossamer.runtime import disk_cache
from gossamer.runtime.cuda import Device

log = logging.getLogger("gossamer")

# Numbers of cuda.h.
_PTX = 1
_INFO_LOG, _INFO_LOG_SIZE, _ERROR_LOG, _ERROR_LOG_SIZE = 3, 4, 5, 6
_MAX_DYNAMIC_SHARED = 8
_LOG_BYTES = 16 << 10


class Module:
    """Kernels on one device. Raises DeviceError with the messages of the driver's compiler if the driver refuses their PTX."""

    def __init__(self, device: Device, ptx: str) -> None:
        self.device = device
        device.within(lambda: self._load(ptx))

    def _load(self, ptx: str) -> None:
        key = _key(self.device, ptx)
        entry = disk_cache.read(key)
        if entry is not None:
            try:
                self._module = self._loaded(entry.code)
                return
            except DeviceError as problem:
                log.warning("kernel cache: %s cannot use the code of %s (%s), it is linked anew", self.device, key, problem)
        cubin = _linked(self.device, ptx)
        disk_cache.write(key, disk_cache.Entry(cubin, {}))
        self._module = self._loaded(cubin)

    def _loaded(self, cubin: bytes) -> int:
        return self.device.driver.handle("cuModuleLoadData", cubin)

    def function(self, name: str, shared: int) -> int:
        """Returns the handle of a kernel that may use `shared` bytes of shared memory a block.

        Raises DeviceError if the device has less.
        """
        if shared > self.device.shared:
            raise DeviceError(f"{name} needs {shared} bytes of shared memory a block, {self.device} has {self.device.shared}")
        found = 0

        def get() -> None:
            nonlocal found
            found = self.device.driver.handle("cuModuleGetFunction", self._module, name.encode())
            self.device.driver.call("cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED, shared)

        self.device.within(get)
        return found


def _key(device: Device, ptx: str) -> str:
    text = f"{device.capability} {device.driver.version}\n{ptx}"
    return f"cubin-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _linked(device: Device, ptx: str) -> bytes:
    """Returns the machine code of PTX for the device, whose context must be current."""
    driver, code = device.driver, ptx.encode() + b"\0"
    logs = [ctypes.create_string_buffer(_LOG_BYTES) for _ in range(2)]  # written to until the linker is destroyed
    options = (ctypes.c_int * 4)(_INFO_LOG, _INFO_LOG_SIZE, _ERROR_LOG, _ERROR_LOG_SIZE)
    values = (ctypes.c_void_p * 4)(*(word for each in logs for word in (ctypes.addressof(each), len(each))))
    linker, cubin, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()

    def check(name: str, error: int) -> None:
        if error:
            raise DeviceError(_refusal(device, ptx, f"{name}: {driver.error(error)}", [each.value for each in logs]))

    check("cuLinkCreate", driver.try_call("cuLinkCreate_v2", 4, options, values, ctypes.byref(linker)))
    try:
        added = driver.try_call("cuLinkAddData_v2", linker, _PTX, code, len(code), b"gossamer", 0, None, None)
        check("cuLinkAddData", added)
        check("cuLinkComplete", driver.try_call("cuLinkComplete", linker, ctypes.byref(cubin), ctypes.byref(size)))
        return ctypes.string_at(cubin.value or 0, size.value)  # a copy: the memory belongs to the linker
    finally:
        driver.try_call("cuLinkDestroy", linker)


def _refusal(device: Device, ptx: str, error: str, logs: list[bytes]) -> str:
    made = " ".join(line for line in ptx.splitlines() if line.startswith((".version", ".target")))
    version = ".".join(map(str, device.driver.version))
    words = "".join(f"\n{text}" for text in (each.decode(errors="replace").strip() for each in reversed(logs)) if text)
    return f"the driver (CUDA {version}) of {device} refuses a kernel with {made}: {error}{words}"
