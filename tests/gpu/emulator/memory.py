"""Memory of the emulated GPU. Addresses are byte offsets; what lies outside of a tensor or was never written is poison."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_GRANULE = 2  # bytes: the smallest element that kernels share
_NOBODY, _SEVERAL = -1, -2


class Fault(Exception):
    """The program did what a GPU forbids or leaves undefined."""


class Memory(Protocol):
    """What global memory is to the machine."""

    def load(self, at: Array, size: int) -> Array:
        """[threads, size] bytes at the addresses of the threads. Fault for an access that is not allowed."""

    def store(self, at: Array, data: Array) -> None:
        """The inverse of load."""


class GlobalMemory:
    """Tensors far apart from each other, each aligned to 16 bytes and no more."""

    def __init__(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        self.valid = np.zeros(0, bool)
        self._placed: dict[int, Array] = {}

    def place(self, array: Array) -> int:
        """Copy an array into memory; returns its address."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = -(-(len(self.bytes) + 4096) // 256) * 256 + 16
        grown = start + flat.size - len(self.bytes)
        self.bytes = np.append(self.bytes, np.zeros(grown, np.uint8))
        self.valid = np.append(self.valid, np.zeros(grown, bool))
        self.bytes[start:], self.valid[start:] = flat, True
        self._placed[start] = array
        return start

    def read(self, address: int) -> Array:
        """What lies now where an array was placed."""
        array = self._placed[address]
        return self.bytes[address : address + array.nbytes].view(array.dtype).reshape(array.shape).copy()

    def load(self, at: Array, size: int) -> Array:
        """[threads, size] bytes."""
        return self.bytes[self._checked(at, size)]

    def store(self, at: Array, data: Array) -> None:
        """The inverse of load."""
        self.bytes[self._checked(at, data.shape[1])] = data

    def _checked(self, at: Array, size: int) -> Array:
        _check_alignment(at, size)
        if at.size and (at.min() < 0 or at.max() + size > len(self.bytes)):
            raise Fault("access outside of global memory")
        places = at[:, None] + np.arange(size)
        if not self.valid[places].all():
            raise Fault("access outside of any tensor in global memory")
        return places


class SharedMemory:
    """The shared memory of some blocks, `size` bytes each, and who touched it last.

    Two accesses of different threads to the same bytes, one of them a write, need a barrier of the block between them; for
    threads of one warp a barrier of the warp is enough. The counters of barriers passed are kept by the machine.
    """

    def __init__(self, blocks: int, size: int, threads: int) -> None:
        self.size, self.threads = size, threads
        self.bytes = np.full(blocks * size, 0xFF, np.uint8)
        granules = blocks * size // _GRANULE
        self.block_barriers = np.zeros(blocks, np.int32)
        self.warp_barriers = np.zeros(blocks * threads // 32, np.int32)
        self._writer = np.full(granules, _NOBODY, np.int32)
        self._reader = np.full(granules, _NOBODY, np.int32)
        self._reading_warp = np.full(granules, _NOBODY, np.int32)
        self._written = np.zeros((2, granules), np.int32)  # barriers of the block, of the warp
        self._read = np.zeros((2, granules), np.int32)

    def load(self, thread: Array, at: Array, size: int) -> Array:
        """[threads, size] bytes, for the numbers of the threads that read."""
        places = self._checked(thread, at, size)
        granules, who, now = self._granules(places, thread)
        self._check(granules, who, now, self._writer, self._written, self._writer // 32, "reads what another wrote")
        first = (self._reader[granules] == _NOBODY) | (self._read[0, granules] != now[0])
        same = ~first & (self._reader[granules] == who)
        warp = ~first & (self._reading_warp[granules] == who // 32)
        self._reader[granules] = np.where(first | same, who, _SEVERAL)
        self._reading_warp[granules] = np.where(first | warp, who // 32, _SEVERAL)
        if thread.size > 1:  # threads of one instruction that read the same bytes
            order = np.argsort(granules, kind="stable")
            equal = np.diff(granules[order]) == 0
            shared = granules[order][1:][equal]
            self._reader[shared] = _SEVERAL
            apart = who[order][1:][equal] // 32 != who[order][:-1][equal] // 32
            self._reading_warp[shared[apart]] = _SEVERAL
        self._read[:, granules] = now
        return self.bytes[places]

    def store(self, thread: Array, at: Array, data: Array) -> None:
        """The inverse of load."""
        places = self._checked(thread, at, data.shape[1])
        granules, who, now = self._granules(places, thread)
        if len(np.unique(granules)) != len(granules) and len(np.unique(places)) != places.size:
            raise Fault("race in shared memory: threads write the same bytes with one instruction")
        self._check(granules, who, now, self._writer, self._written, self._writer // 32, "writes what another wrote")
        self._check(granules, who, now, self._reader, self._read, self._reading_warp, "writes what another read")
        self._writer[granules], self._written[:, granules] = who, now
        self.bytes[places] = data

    def _checked(self, thread: Array, at: Array, size: int) -> Array:
        _check_alignment(at, size)
        if at.size and (at.min() < 0 or at.max() + size > self.size):
            raise Fault(f"access outside of shared memory: byte {int(at.max()) + size} of {self.size}")
        return (at + thread // self.threads * self.size)[:, None] + np.arange(size)

    def _granules(self, places: Array, thread: Array) -> tuple[Array, Array, Array]:
        """Which granules each access touches, flat, by which thread, after how many barriers."""
        granules = places[:, ::_GRANULE] // _GRANULE
        who = np.repeat(thread, granules.shape[1]).astype(np.int32)
        now = np.stack([self.block_barriers[who // self.threads], self.warp_barriers[who // 32]])
        return granules.reshape(-1), who, now

    def _check(self, granules: Array, who: Array, now: Array, other: Array, then: Array, warp: Array, what: str) -> None:
        others = other[granules]
        unordered = (others != _NOBODY) & (others != who) & (then[0, granules] == now[0])
        in_order = (warp[granules] == who // 32) & (then[1, granules] < now[1])
        if (unordered & ~in_order).any():
            first = int(np.argmax(unordered & ~in_order))
            raise Fault(
                f"race in shared memory: thread {who[first] % self.threads} {what} "
                f"at byte {granules[first] * _GRANULE % self.size} without a barrier between"
            )


def _check_alignment(at: Array, size: int) -> None:
    if (at % size).any():
        raise Fault(f"misaligned access of {size} bytes")
