"""Machine code for 64-bit ARM, run on this process's memory by qemu's user-mode emulation.

What torch and Gossamer do besides stays here: only kernels run there. `guest.c` fetches the pages that a kernel touches and
brings back what it wrote. It needs Debian's packages qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross.
"""

import atexit
import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from gossamer.runtime.jit import Code

_COMPILER, _QEMU, _ROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
_NO_ZVA = "GLIBC_TUNABLES=glibc.cpu.name=kunpeng920"
"""Has the C library do without the instruction `dc zva`, after whose faults qemu 7.2 goes on at a wrong place."""
_NO_SPINNING = "OMP_WAIT_POLICY=passive"
_PAGE, _AT_ONCE = 4096, 64 << 10
_lock = threading.Lock()


def missing() -> str | None:
    """Why nothing can be emulated here, or None."""
    lacks = [name for name in (_COMPILER, _QEMU) if shutil.which(name) is None]
    return f"this machine has no {' and no '.join(lacks)}" if lacks else None


def load(code: bytes, entry: str) -> Code:
    """As `jit.load`: an address in this process, a call of which runs the code there."""
    number = _guest().load(code, entry)

    def call(words: int) -> None:
        _guest().call(number, words)

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return Code(address, function, _guest())  # type: ignore[arg-type]


@cache
def _guest() -> "_Guest":
    return _Guest()


class _Vector(ctypes.Structure):
    """Linux's struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class _Guest:
    """A process of the emulator, and this process's memory as it asks for it."""

    def __init__(self) -> None:
        self.directory, self.libraries = Path(tempfile.mkdtemp(prefix="gossamer-arm64-")), 0
        self.failed: str | None = None
        atexit.register(shutil.rmtree, self.directory, True)
        program = self.directory / "guest"
        libraries = ["-lgomp", "-lm", "-ldl"]
        source = Path(__file__).with_name("guest.c")
        subprocess.run([_COMPILER, "-O2", "-o", program, source, "-Wl,--no-as-needed", *libraries], check=True)
        emulator = [_QEMU, "-cpu", "max,sve=off", "-L", _ROOT, "-E", _NO_ZVA, "-E", _NO_SPINNING, program]
        self.process = subprocess.Popen(emulator, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self.process.kill)
        self.libc = ctypes.CDLL(None, use_errno=True)

    def load(self, code: bytes, entry: str) -> int:
        """The number of a library with this code."""
        with _lock:
            self.libraries += 1
            path = self.directory / str(self.libraries)
            path.with_suffix(".o").write_bytes(code)
            library = path.with_suffix(".so")
            linked = [_COMPILER, "-shared", "-o", library, path.with_suffix(".o"), f"-Wl,--defsym,entry={entry}"]
            subprocess.run(linked if entry != "entry" else linked[:-1], check=True)
            name = os.fsencode(library)
            number = self._ask(b"L" + struct.pack("q", len(name)) + name)
            if number < 0:
                raise RuntimeError(f"the emulator cannot load {library}")
            return number

    def call(self, number: int, words: int) -> None:
        """Runs `entry` of a library."""
        with _lock:
            self._ask(b"C" + struct.pack("qq", number, words))

    def _ask(self, request: bytes) -> int:
        """The answer, after all memory that it takes."""
        self._write(request)
        while True:
            what, value = struct.unpack("=cq", self._read(9))
            if what == b"R":
                memory = self._memory(value)
                self._write(struct.pack("q", len(memory)) + memory)
            elif what == b"W":
                (size,) = struct.unpack("q", self._read(8))
                ctypes.memmove(value, self._read(size), size)
            else:
                return int(value)

    def _memory(self, address: int) -> bytes:
        """Whole pages from an address on, as many as there are, up to a limit; none where nothing is."""
        size = _AT_ONCE - address % _AT_ONCE
        memory = ctypes.create_string_buffer(size)
        here = _Vector(ctypes.addressof(memory), size)
        there = _Vector(address, size)
        read = self.libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        return memory.raw[: max(read, 0) // _PAGE * _PAGE]

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self.process.stdout is not None
        data = self.process.stdout.read(size)
        if len(data) < size:
            raise RuntimeError(f"the emulator ended: {self.process.wait()}")
        return data
