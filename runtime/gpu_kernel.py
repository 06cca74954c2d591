"""Loads the kernels of a region on GPUs, one module for each device, and launches the one that suits the number of tokens."""

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossamer.dialects.errors import DeviceError
from gossamer.dialects.launch import Launch, choose
from gossamer.runtime import cuda
from gossamer.runtime.cuda_module import Module

_MOST_CHOSEN = 1024


class GpuKernel:
    """PTX with one or more kernels that compute the same, callable from any number of threads at once.

    launches  how to launch each kernel, by its name
    words     how many 64-bit words each kernel takes: addresses and sizes (see the pass emit-gpu-entry)
    open      returns the device with a number; tests give another function
    """

    def __init__(
        self, ptx: str, launches: Mapping[str, Launch], words: int, open: Callable[[int], cuda.Device] = cuda.device
    ) -> None:
        self._ptx, self._launches, self._words, self._open = ptx, dict(launches), words, open
        self._loaded: dict[int, _Loaded] = {}
        self._lock = threading.Lock()
        self._arguments = _Arguments(words)

    def load(self, index: int) -> "_Loaded":
        """Makes the driver compile the kernels for cuda:index. It cannot do so while a CUDA graph is captured."""
        with self._lock:
            if index not in self._loaded:
                self._loaded[index] = _Loaded.on(self._open(index), self._ptx, self._launches)
            return self._loaded[index]

    def run(self, words: list[int], tokens: int, index: int, stream: int) -> None:
        """Launches a kernel on a stream of cuda:index, and does not wait for it.

        Nothing is checked: until the kernel has run, every address must be a multiple of 16 and hold what its types say.
        """
        if tokens == 0:
            return
        loaded = self._loaded.get(index) or self.load(index)
        function, grid, launch = loaded.chosen.get(tokens) or loaded.choose(tokens)
        arguments, driver = self._arguments, loaded.device.driver
        arguments.array[:] = words  # type: ignore[assignment]  # ctypes converts the numbers
        loaded.device.within(
            lambda: driver.call(
                "cuLaunchKernel", function, grid, 1, 1, launch.threads, 1, 1, launch.shared, stream, arguments.addresses, None
            )
        )


@dataclass(frozen=True)
class _Loaded:
    """The kernels that fit into the shared memory of one device.

    chosen  (function, grid, launch) by the number of tokens, for numbers that were asked for before
    """

    device: cuda.Device
    launches: dict[str, Launch]
    functions: dict[str, int]
    chosen: dict[int, tuple[int, int, Launch]] = field(default_factory=dict)

    @classmethod
    def on(cls, device: cuda.Device, ptx: str, launches: Mapping[str, Launch]) -> "_Loaded":
        fitting = {name: launch for name, launch in launches.items() if launch.shared <= device.shared}
        if not fitting:
            least = min(launch.shared for launch in launches.values())
            raise DeviceError(f"the kernel needs {least} bytes of shared memory a block, {device} has {device.shared}")
        module = Module(device, ptx)
        return cls(device, fitting, {name: module.function(name, launch.shared) for name, launch in fitting.items()})

    def choose(self, tokens: int) -> tuple[int, int, Launch]:
        """Returns what to launch for a number of tokens, and remembers it, because choosing takes longer than the launch."""
        name = choose(self.launches, tokens, self.device.multiprocessors)
        launch = self.launches[name]
        if len(self.chosen) >= _MOST_CHOSEN:
            self.chosen.clear()
        self.chosen[tokens] = found = self.functions[name], launch.grid(tokens), launch
        return found


class _Arguments(threading.local):
    """The words that a thread passes to a kernel, and the address of each word, which the driver takes."""

    def __init__(self, length: int) -> None:
        self.array = (ctypes.c_int64 * length)()
        first, step = ctypes.addressof(self.array), ctypes.sizeof(ctypes.c_int64)
        self.addresses = (ctypes.c_void_p * length)(*(first + i * step for i in range(length)))
