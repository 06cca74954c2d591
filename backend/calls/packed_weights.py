"""Packed weights, kept as long as the tensors they were packed from live, and renewed when those change.

A weight is recognised by its leaves' storages (weak references, so a freed and reused address is never taken for the
old tensor), data pointers and version counters. When a version moves on:

    same pattern                       the values are gathered again
    new pattern                        it is packed again
    new pattern at every call          dense, until it stays the same for two calls
    new values at every call           the same, where gathering them costs more than sparse saves
    too dense for sparse to pay        dense, until it changes
    new while a CUDA graph is captured dense in that graph

Weights are packed on the CPU and kept where they are used.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gossamer.backend.graph.weight_expressions import run
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.runtime.nonzeros import count_nonzeros
from gossamer.runtime.packing import Packed, pack
from gossamer.runtime.weight_store import store_of

_SETTLED = 2
"""Calls that a packing must have served before a new pattern is packed at once."""

_RESTLESS = 3
"""Changes in a row, each after a single call, by which a weight counts as changing at every call."""

_Key = int | tuple[int, ...]
"""Addresses of the leaves; of a single one, that is of most weights, without a tuple around it."""

_HOLLOW = 0.75
"""Share of the nonzeros below which a pattern that lost values is packed again."""


@dataclass(eq=False, slots=True)
class _Entry:
    """What is known about one weight at one version.

    storage   of the only leaf of a packed weight, if it has a version; its `version`
    packed    None while it is run dense
    calls     that this packing has served, and `before` those of earlier versions
    changes   versions in a row that served a single call
    """

    storages: tuple[weakref.ref[torch.UntypedStorage], ...]
    versions: tuple[int, ...]
    packed: Packed | None
    nonzeros: int
    density: float
    calls: int = 0
    before: int = 0
    changes: int = 0
    storage: weakref.ref[torch.UntypedStorage] | None = None
    version: int = -1

    def is_current(self, leaves: Sequence[torch.Tensor]) -> bool:
        return _versions(leaves) == self.versions and _same_storages(self, leaves)


@dataclass(eq=False)
class Packings:
    """All weights that are computed by one expression and packed in one format.

    key       content hash of the expression and of its leaves' types
    evaluate  leaf values → the matrix as it is stored
    format    what it is packed in
    """

    key: str
    evaluate: Callable[..., torch.Tensor]
    format: Format | Packing
    _entries: dict[_Key, _Entry] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _unsettled: int = 0

    @classmethod
    def of(cls, key: str, evaluate: Callable[..., torch.Tensor], format: Format | Packing) -> "Packings":
        """Those that all regions share which have this weight in this format."""
        return _known.setdefault((key, str(format)), cls(key, evaluate, format))

    def __reduce__(self) -> tuple[Any, ...]:
        return Packings.of, (self.key, self.evaluate, self.format)

    def current(self, leaves: Sequence[torch.Tensor], densest: float, renew: bool = True) -> Packed | None:
        """The packed weight for these leaves; None where it is denser than `densest` or will not settle.

        `renew` tells whether sparse pays even where new values have to be gathered before every call.
        """
        # Runs at every call, mostly for a single leaf that has a version, and so looks at such a one without a call.
        leaf = leaves[0]
        entry = self._entries.get(leaf.data_ptr() if len(leaves) == 1 else _key(leaves))
        if entry is not None and entry.storage is not None:
            known = entry.storage() is leaf.untyped_storage() and entry.version == leaf._version
        else:
            known = entry is not None and entry.is_current(leaves) and (entry.packed is not None or entry.density > densest)
        if entry is None or not known:
            entry = self._renewed(leaves, densest, renew)
        entry.calls += 1
        if entry.calls == _SETTLED:
            self._unsettled = 0
        return entry.packed if entry.density <= densest else None

    def verified(self, leaves: Sequence[torch.Tensor], densest: float, renew: bool = True) -> Packed | None:
        """As `current`, after comparing every value, so that writes which no version counter shows are seen."""
        packed = self.current(leaves, densest, renew)
        if packed is None or _capturing(leaves) or packed.matches(run(self.evaluate, leaves)):
            return packed
        with self._lock:
            self._entries.pop(_key(leaves), None)
        return self.current(leaves, densest, renew)

    def __len__(self) -> int:
        return len(self._entries)

    def _renewed(self, leaves: Sequence[torch.Tensor], densest: float, renew: bool) -> _Entry:
        if _capturing(leaves):
            return _dense(leaves)
        with self._lock:
            key = _key(leaves)
            old = self._entries.get(key)
            if old is not None and not _same_storages(old, leaves):
                old = None
            again = old is not None and old.is_current(leaves)
            if again and old is not None and (old.packed is not None or old.density > densest):
                return old  # another thread was faster
            entry = None
            if old is not None and not again:
                changes = old.changes + 1 if old.calls - old.before <= 1 else 0
                if old.packed is None or (changes >= _RESTLESS and not renew):
                    entry = _dense(leaves)
                else:
                    entry = self._refreshed(old, leaves, changes)
                if entry is None and old.calls < _SETTLED:
                    entry = _dense(leaves)
            elif old is None and self._unsettled > 8 + 2 * len(self._entries):
                entry = _dense(leaves)  # a new tensor at every call
            if entry is None:
                entry = self._packed(leaves, densest)
            self._entries[key] = self._watched(entry, key, leaves)
            return entry

    def _refreshed(self, old: _Entry, leaves: Sequence[torch.Tensor], changes: int) -> _Entry | None:
        """The entry with the new values in the old pattern; None if they do not fit it, or leave it hollow."""
        assert old.packed is not None
        versions, value = _versions(leaves), run(self.evaluate, leaves)
        if not old.packed.refresh(value):
            return None
        nonzeros = count_nonzeros(old.packed.values)
        if nonzeros < _HOLLOW * old.nonzeros:
            return None
        density, packed = nonzeros / value.numel(), _adopted(old.packed, leaves)
        return _Entry((), versions, packed, old.nonzeros, density, old.calls, old.calls, changes)

    def _packed(self, leaves: Sequence[torch.Tensor], densest: float) -> _Entry:
        self._unsettled += 1
        versions, value = _versions(leaves), run(self.evaluate, leaves)
        nonzeros = count_nonzeros(value)
        density = nonzeros / value.numel()
        packed = _adopted(pack(value.cpu(), self.format).to(value.device), leaves) if density <= densest else None
        return _Entry((), versions, packed, nonzeros, density)

    def _watched(self, entry: _Entry, key: _Key, leaves: Sequence[torch.Tensor]) -> _Entry:
        """The entry, to be dropped when one of the storages under it dies."""
        drop = partial(self._entries.pop, key)  # the reference is what pop returns where nothing is left to drop
        entry.storages = tuple(weakref.ref(leaf.untyped_storage(), drop) for leaf in leaves)
        if len(leaves) == 1 and entry.versions[0] >= 0 and entry.packed is not None:
            entry.storage, entry.version = entry.storages[0], entry.versions[0]
        return entry


_known: dict[tuple[str, str], Packings] = {}


def _capturing(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether the calls of this thread go into a CUDA graph, during which nothing may wait for the GPU."""
    return leaves[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _key(leaves: Sequence[torch.Tensor]) -> _Key:
    return leaves[0].data_ptr() if len(leaves) == 1 else tuple([leaf.data_ptr() for leaf in leaves])


def _adopted(packed: Packed, leaves: Sequence[torch.Tensor]) -> Packed:
    """What has been packed, kept in place of the dense weight if that is to be freed."""
    store = store_of(leaves[0]) if len(leaves) == 1 else None
    return packed if store is None else store.adopt(packed)


def _dense(leaves: Sequence[torch.Tensor]) -> _Entry:
    """An entry that waits: the next call with the same versions packs it."""
    return _Entry((), _versions(leaves), None, 0, 0.0)


def _same_storages(entry: _Entry, leaves: Sequence[torch.Tensor]) -> bool:
    return all(ref() is leaf.untyped_storage() for ref, leaf in zip(entry.storages, leaves, strict=True))


def _version(leaf: torch.Tensor) -> int:
    return -1 if leaf.is_inference() else leaf._version


def _versions(leaves: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple([_version(leaf) for leaf in leaves])
