"""Remembers values that were made of tensors, until the tensors change or die: packed weights, sorted edge lists, rows of
matrices.

A value is made once, for many calls. It is used again for the tensors of a call if

    their storages are the same      weak references tell, because an address may be freed and used again
    they lie in them as before       same address, sizes, strides and type
    nobody has written to them       same count of writes and same sample of values, or all values equal to a copy

The value is dropped when one of the storages dies. So it must not share memory with the tensors.
"""

import ctypes
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.runtime.memory.huge_pages import large_empty
from gossamer.runtime.sample import samples_of
from gossamer.runtime.torch_internals import function_modes
from gossamer.runtime.uncounted import counts_writes
from gossamer.runtime.watching.calls import watched

T = TypeVar("T")

Compared = Literal["none", "uncounted", "all"]
"""The tensors whose values are compared with a copy: none, those to which torch counts no writes (see uncounted.py), or all."""


_REFERENT: Callable[[weakref.ref[torch.UntypedStorage]], torch.UntypedStorage | None] = weakref.ref.__call__
_VERSION = operator.attrgetter("_version")


class Made(Generic[T]):
    """A value, and the facts that show whether the tensors it was made of are unchanged.

    value      the value; its maker sets it
    places     each tensor's address; samples are read only if it is the same, because torch may have freed the old memory
    versions   each tensor's count of writes when the value was made, -1 for tensors that were made in inference mode
    counted    whether these counts show all writes
    looked_at  samples of the tensors' memory, if `counted` and no values were copied; they show some writes without a count
    seen       the values that the samples had
    storage    of the only tensor, if its `version` and `looked_at` show all changes, else None; lets `get` avoid a call
    """

    # No weak reference to a tensor itself: torch.utils.swap_tensors refuses tensors that have one.
    __slots__ = ("_copies", "_storages", "counted", "looked_at", "places", "seen", "storage", "value", "version", "versions")
    value: T

    def __init__(self, tensors: Sequence[Tensor], compared: Compared, forget: Callable[[Any], None]) -> None:
        """Call this before you read the tensors' values. `forget` is called when one of the storages dies."""
        self.places, self.versions = [*map(Tensor.data_ptr, tensors)], _versions(tensors)
        counted = [counts_writes(t) for t in tensors]
        self.counted = all(counted)
        copied = [n for n, each in enumerate(counted) if compared == "all" or (compared == "uncounted" and not each)]
        self._copies = [(n, _copy(tensors[n])) for n in copied]
        self._storages = [weakref.ref(t.untyped_storage(), forget) for t in tensors]
        told = self.counted and not copied
        samples = samples_of(tensors) if told else []
        self.looked_at, self.seen = [memory for memory, _ in samples], [values for _, values in samples]
        alone = told and len(tensors) == 1
        self.storage: weakref.ref[torch.UntypedStorage] | None = self._storages[0] if alone else None
        self.version = self.versions[0] if alone else -1

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the value was made of these tensors, whatever has been written to them since."""
        return all(map(operator.is_, map(_REFERENT, self._storages), map(Tensor.untyped_storage, tensors)))

    def changed(self, tensors: Sequence[Tensor]) -> list[int]:
        """Returns the indices of the tensors that may have changed, among those that the value was made of, at the same
        addresses. These are all tensors if torch does not count all writes, or if their values were copied."""
        if not self.counted or not self.looked_at:
            return [*range(len(tensors))]
        looked_at = zip(self.versions, _versions(tensors), self.looked_at, self.seen, strict=True)
        return [n for n, (before, now, memory, seen) in enumerate(looked_at) if before != now or memory != seen]

    @property
    def is_gone(self) -> bool:
        """Whether one of the tensors' storages has died."""
        return any(each() is None for each in self._storages)

    def is_current(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the value was made of these tensors as they are now. Their shapes must be the value's (see `_key`)."""
        return (
            self.is_of(tensors)
            and self.places == [*map(Tensor.data_ptr, tensors)]
            and self.versions == _versions(tensors)
            and self.looked_at == self.seen
            and all(_holds(tensors[n], copy) for n, copy in self._copies)
        )


class Remembered(Generic[T]):
    """Values, found by the tensors that they were made of. Safe to use from several threads.

    compared  the tensors whose values are compared with a copy
    most      the largest number of values; beyond it, the oldest value is dropped
    """

    def __init__(self, compared: Compared = "uncounted", most: int | None = None) -> None:
        self.compared, self._most = compared, most
        self._entries: dict[Hashable, Made[T]] = {}
        self._lock = threading.RLock()

    def get(self, tensors: Sequence[Tensor], more: Sequence[Hashable], make: Callable[[], T]) -> T:
        """Returns the value for these tensors and for `more`, everything else it depends on. Calls `make` if it is not
        known."""
        key = _key(tensors, more)
        found = self._entries.get(key)
        if found is not None:
            # The usual case, a single tensor with a count of writes, without a call.
            if found.storage is not None and found.storage() is tensors[0].untyped_storage():
                current = (
                    not tensors[0].is_inference() and found.version == tensors[0]._version and found.looked_at == found.seen
                )
            else:
                current = found.is_current(tensors)
            if current:
                return found.value
        with self._lock:
            found = self._entries.get(key)
            if found is None or not found.is_current(tensors):  # otherwise another thread has just made it
                found = self._begin(key, tensors)
                with on_cpu():
                    found.value = watched("packing", make)()
                self._put(key, found)
            return found.value

    def known(self, tensors: Sequence[Tensor], more: Sequence[Hashable]) -> T | None:
        """Returns the value if it is known, else None."""
        found = self._entries.get(_key(tensors, more))
        return found.value if found is not None and found.is_current(tensors) else None

    def items(self) -> list[tuple[Hashable, T]]:
        """Returns (key, value) pairs, oldest first. `forget` takes the keys."""
        return [(key, made.value) for key, made in self._entries.copy().items()]

    def forget(self, key: Hashable) -> None:
        """Drops a value."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)

    def _begin(self, key: Hashable, tensors: Sequence[Tensor]) -> Made[T]:
        return Made(tensors, self.compared, _Forget(self, key))

    def _put(self, key: Hashable, made: Made[T]) -> None:
        self._entries.pop(key, None)
        while self._most is not None and len(self._entries) >= self._most:
            self._entries.pop(next(iter(self._entries)), None)
        self._entries[key] = made


def on_cpu() -> AbstractContextManager[Any]:
    """Returns a context in which new tensors are on the CPU. A default device is for the user's own tensors."""
    return torch.device("cpu") if function_modes() else nullcontext()


def _key(tensors: Sequence[Tensor], more: Sequence[Hashable]) -> Hashable:
    # Several storages may share the same memory, so the storage itself is part of the key.
    return *more, *[(t.data_ptr(), t.shape, t.stride(), t.dtype, t.untyped_storage()._cdata) for t in tensors]


class _Forget:
    """The callback of a dying storage. It keeps the `Remembered` alive only weakly, so that all values go with it."""

    __slots__ = ("_key", "_of")

    def __init__(self, of: Remembered[Any], key: Hashable) -> None:
        self._of, self._key = weakref.ref(of), key

    def __call__(self, _: object) -> None:
        of = self._of()
        if of is not None:
            of.forget(self._key)


def _copy(t: Tensor) -> Tensor:
    return large_empty(t.shape, t.dtype).copy_(t) if t.is_contiguous() and t.device.type == "cpu" else t.clone()


def _holds(t: Tensor, copy: Tensor) -> bool:
    """Whether a tensor has the bits of its copy. C's memcmp is five times as fast as torch.equal."""
    plain = type(t) in (Tensor, Parameter) and t.is_cpu and t.is_contiguous() and copy.is_contiguous()
    if plain and (address := t.data_ptr()):  # otherwise the tensor is empty, or has no address
        return not _memcmp(address, copy.data_ptr(), t.nbytes)
    return torch.equal(copy, t)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:  # one was made in inference mode; asking each first would double the time
        return [-1 if t.is_inference() else t._version for t in tensors]
