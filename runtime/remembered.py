"""What was made of tensors, kept until they change or die.

A weight is packed, an edge list sorted, a matrix brought into rows: once, for many calls. What was made is that of the tensors
of a call if

    their storages are the same      seen by weak references, for an address may be freed and used again
    they lie in them as before       address, sizes, strides and type
    nobody has written to them       by torch's count of writes and a sample of their values, or by comparing all with a copy

It goes when one of the storages dies, and so must not share their memory.
"""

import ctypes
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.runtime.memory.huge_pages import large_empty
from gossamer.runtime.sample import samples_of
from gossamer.runtime.uncounted import counts_writes
from gossamer.runtime.watching.calls import watched

T = TypeVar("T")

Compared = Literal["none", "uncounted", "all"]
"""Of which tensors the values are compared: of those to which torch counts no writes (see uncounted.py), or of all."""


_REFERENT: Callable[[weakref.ref[torch.UntypedStorage]], torch.UntypedStorage | None] = weakref.ref.__call__
_VERSION = operator.attrgetter("_version")


class Made(Generic[T]):
    """A value, and what tells that some tensors are still those that it was made of.

    value      what was made; to be set by who makes it
    versions   how often each tensor had been written to, -1 for those that were made in inference mode
    counted    whether that shows all writes
    looked_at  some of their memory, if nothing else tells of writes that are not counted, and what was `seen` there
    storage    that of the only tensor, if its `version` and `looked_at` say all, None otherwise; for a look without a call
    """

    # No weak reference to a tensor itself: torch.utils.swap_tensors refuses what has one.
    __slots__ = ("_copies", "_storages", "counted", "looked_at", "seen", "storage", "value", "version", "versions")
    value: T

    def __init__(self, tensors: Sequence[Tensor], compared: Compared, forget: Callable[[Any], None]) -> None:
        """To be called before their values are read; `forget` is called when one of the storages dies."""
        self.versions = _versions(tensors)
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
        """Whether it was made of these tensors, whatever has been written to them since."""
        return all(map(operator.is_, map(_REFERENT, self._storages), map(Tensor.untyped_storage, tensors)))

    @property
    def is_gone(self) -> bool:
        """Whether one of the tensors' storages has died."""
        return any(each() is None for each in self._storages)

    def is_current(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it was made of these tensors as they are now, if it was made of some at these addresses."""
        return (
            self.is_of(tensors)
            and self.versions == _versions(tensors)
            and self.looked_at == self.seen
            and all(_holds(tensors[n], copy) for n, copy in self._copies)
        )


class Remembered(Generic[T]):
    """Values by the tensors they were made of. Safe to use from several threads.

    compared  of which tensors the values are compared
    most      how many values there are at most: the one that was made first goes first
    """

    def __init__(self, compared: Compared = "uncounted", most: int | None = None) -> None:
        self.compared, self._most = compared, most
        self._entries: dict[Hashable, Made[T]] = {}
        self._lock = threading.RLock()

    def get(self, tensors: Sequence[Tensor], more: Sequence[Hashable], make: Callable[[], T]) -> T:
        """What `make` returns for these tensors and for what else it depends on; called if that is not known yet."""
        key = _key(tensors, more)
        found = self._entries.get(key)
        if found is not None:
            # Most are of a single tensor that has a version.
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
            if found is None or not found.is_current(tensors):  # else another thread was faster
                found = self._begin(key, tensors)
                found.value = watched("packing", make)()
                self._put(key, found)
            return found.value

    def known(self, tensors: Sequence[Tensor], more: Sequence[Hashable]) -> T | None:
        """What `get` returns without a call of `make`, None if that is not known."""
        found = self._entries.get(_key(tensors, more))
        return found.value if found is not None and found.is_current(tensors) else None

    def items(self) -> list[tuple[Hashable, T]]:
        """The values, by keys to forget them by; the one that was made first comes first."""
        return [(key, made.value) for key, made in self._entries.copy().items()]

    def forget(self, key: Hashable) -> None:
        """Lets a value go."""
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


def _key(tensors: Sequence[Tensor], more: Sequence[Hashable]) -> Hashable:
    # Several storages may be over the same memory: each has its own.
    return *more, *[(t.data_ptr(), t.shape, t.stride(), t.dtype, t.untyped_storage()._cdata) for t in tensors]


class _Forget:
    """What a dying storage calls. It keeps nothing alive, so that what was made goes at once where nobody remembers it."""

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
    """Whether a tensor has the bits of its copy, by the C library, which is five times as fast as torch.equal at that."""
    plain = type(t) in (Tensor, Parameter) and t.is_cpu and t.is_contiguous() and copy.is_contiguous()
    if plain and (address := t.data_ptr()):  # else there is nothing, or nobody but torch knows where it is
        return not _memcmp(address, copy.data_ptr(), t.nbytes)
    return torch.equal(copy, t)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:  # one was made in inference mode; to ask them all first takes as long as all else
        return [-1 if t.is_inference() else t._version for t in tensors]
