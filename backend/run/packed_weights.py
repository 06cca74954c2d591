"""Packs weights, keeps them as long as the tensors that they were computed from, and renews them when these change.

A weight is computed by an expression from tensors, its leaves. `Packings` recognises a weight by its leaves:

storages           weak references, so that a reused address is never taken for the old tensor
data pointers      the keys of the entries
version counters   compared at every call
a few values       compared at every call; all values if torch does not count all writes (see runtime/uncounted.py)

If a leaf has changed, weight_states.py says what to do. A weight that is new while a CUDA graph is captured runs dense in that
graph. Most weights never change. So the positions of its values in the dense weight, 4 bytes a value, are not kept before the
first change. Weights are packed on the CPU, and kept on the device that uses them.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from gossamer.backend.graph.masked_matrix import arrangement_of, mask_of
from gossamer.backend.graph.weight_expressions import run
from gossamer.backend.run.lost_zeros import ran_densely
from gossamer.backend.run.weight_states import RESTLESS, SETTLED, TRANSITIONS, Change, KnownWeight, News, State
from gossamer.dialects.errors import FormatError
from gossamer.dialects.format import Format
from gossamer.dialects.packing import Packing
from gossamer.runtime.packers.nonzeros import count_nonzeros
from gossamer.runtime.packing import Packed, pack
from gossamer.runtime.remembered import Made, Remembered, on_cpu
from gossamer.runtime.watching.calls import watched
from gossamer.runtime.weight_store import store_of

if TYPE_CHECKING:
    from gossamer.backend.graph.stored_matrix import StoredMatrix

_Key = int | tuple[int, ...]
"""Addresses of the leaves. Most weights have one leaf: then its address, without a tuple, which is faster to look up."""

_HOLLOW = 0.75
"""If new values leave a packed pattern with less than this share of its nonzeros, the weight is packed again."""

_GROWN = 0.6
"""If more than this share of the stored values is nonzero, the zeros are packed, too. Training has just added them to the
pattern, and changes them next."""


class Packings(Remembered[KnownWeight]):
    """All weights that are computed by one expression and packed in one format.

    key       content hash of the expression and of its leaves' types
    evaluate  leaf values → the dense matrix to pack
    format    the format or packing
    """

    def __init__(self, key: str, evaluate: Callable[..., torch.Tensor], format: Format | Packing) -> None:
        super().__init__(compared="none")  # except in `verified`
        self.key, self.evaluate, self.format = key, evaluate, format
        self._stored, self._masked = _stored_matrix(evaluate), arrangement_of(evaluate)
        self._unsettled, self._compares = 0, False

    @classmethod
    def of(cls, key: str, evaluate: Callable[..., torch.Tensor], format: Format | Packing) -> "Packings":
        """Returns the packings for this key and format. All regions of the process share them."""
        with _lock:
            return _known.setdefault((key, str(format)), cls(key, evaluate, format))

    def __reduce__(self) -> tuple[Any, ...]:
        return Packings.of, (self.key, self.evaluate, self.format)

    def first(self, leaves: Sequence[torch.Tensor], densest: float) -> Packed | None:
        """Does the same as `current` when a region is built. Raises FormatError if the format cannot hold the weight."""
        packed = self.current(leaves, densest)
        made = self._entries.get(_key(leaves))
        if made is not None and made.value.refused:
            raise FormatError(made.value.refused)
        return packed

    def current(self, leaves: Sequence[torch.Tensor], densest: float, renew: bool = True) -> Packed | None:
        """Returns the packed weight for these leaves, or None if it is denser than `densest` or changes too often.

        renew  whether the sparse kernel is faster even if new values have to be gathered before every call
        """
        # Runs at every call, mostly for one leaf with a version. So the check of such a leaf is written out here.
        leaf = leaves[0]
        made = self._entries.get(leaf.data_ptr() if len(leaves) == 1 else _key(leaves))
        if made is not None and made.storage is not None:
            same = made.storage() is leaf.untyped_storage() and made.version == leaf._version
            known = same and made.looked_at == made.seen
        else:
            known = made is not None and self._is_current(made, leaves)
        if made is None or not known or (weight := made.value).lent or (weight.packed is None and weight.density <= densest):
            weight, packed = watched("packing", self._renewed)(leaves, densest, renew)
        else:
            packed = weight.packed
        weight.calls += 1
        if weight.calls == SETTLED:
            self._unsettled = 0
        if packed is None or weight.density > densest:
            if not (weight.refused or self._stored is not None or _capturing(leaves)):
                ran_densely(leaves, lambda: self._density(leaves) > densest)
            return None
        return packed

    def _density(self, leaves: Sequence[torch.Tensor]) -> float:
        value = run(self.evaluate, leaves)
        return count_nonzeros(value) / value.numel()

    def verified(self, leaves: Sequence[torch.Tensor], densest: float, renew: bool = True) -> Packed | None:
        """Does the same as `current`, but compares every value, to notice writes that torch does not count."""
        self._compares = True
        made = self._entries.get(_key(leaves))
        if made is not None and made.value.lacks_source:
            self._entries.pop(_key(leaves), None)
        elif made is not None:
            made.storage, made.counted = None, False
        return self.current(leaves, densest, renew)

    def _is_current(self, made: Made[KnownWeight], leaves: Sequence[torch.Tensor]) -> bool:
        """Whether an entry was made of the current values of the leaves. Compares them if torch does not count all writes."""
        if not made.is_current(leaves):
            return False
        packed = made.value.packed
        return made.counted or packed is None or _capturing(leaves) or packed.matches(run(self.evaluate, leaves))

    def _renewed(self, leaves: Sequence[torch.Tensor], densest: float, renew: bool) -> tuple[KnownWeight, Packed | None]:
        """Returns the known weight for these leaves after a change, and the packed weight for this call."""
        if _capturing(leaves):
            return KnownWeight(), None
        # A packed weight outlives torch.inference_mode, and later calls write new values to it.
        with self._lock, on_cpu(), torch.inference_mode(False), torch.no_grad():
            key = _key(leaves)
            made = self._entries.get(key)
            old = made.value if made is not None and made.is_of(leaves) else None
            same = made is not None and self._is_current(made, leaves)
            begun = self._begin(key, leaves)
            changed = made.changed(leaves) if made is not None and old is not None else []
            news = self._news(old, same, changed, begun.counted, leaves, densest, renew)
            state = State.UNKNOWN if old is None else old.state(densest)
            steps = TRANSITIONS.get((state, news.change), ())
            tried = (getattr(self, step)(old, news) for step in steps)
            weight: KnownWeight = next((each for each in tried if each is not None), KnownWeight())
            if weight is not old:
                begun.value = weight
                self._put(key, begun)
            return weight, self._filled(weight, leaves) if weight.lent else weight.packed

    def _news(
        self, old: KnownWeight | None, same: bool, written: list[int], counted: bool,
        leaves: Sequence[torch.Tensor], densest: float, renew: bool,
    ) -> News:  # fmt: skip
        """Returns what happened to a weight since the last call, if only leaves at the indices `written` may have changed."""
        changes = old.changes + 1 if old is not None and old.calls - old.before <= 1 else 0
        if old is None:
            change = Change.FLOOD if self._unsettled > 8 + 2 * len(self) else Change.FIRST
        elif same:
            change = Change.NONE
        elif self._stored is not None and written == [len(leaves) - 1]:
            change = Change.STORED
        elif self._masked is not None and len(written) == 1:
            change = Change.FACTOR
        else:
            change = Change.RESTLESS if changes >= RESTLESS and not renew else Change.MATRIX
        return News(change, list(leaves), written, changes, densest, counted and not self._compares)

    def _kept(self, old: KnownWeight, news: News) -> KnownWeight:
        """Keeps the weight, which another thread has renewed meanwhile."""
        return old

    def _owning(self, old: KnownWeight, news: News) -> KnownWeight:
        """Gives a lent weight its own values, because a second call has the same ones."""
        old.packed, old.lent = self._filled(old, news.leaves), False
        return old

    def _repacked(self, old: KnownWeight, news: News) -> KnownWeight | None:
        """Packs the weight again. Returns None if the old packing served too few calls."""
        return None if old.calls < SETTLED else self._packed(old, news)

    def _refreshed(self, old: KnownWeight, news: News) -> KnownWeight | None:
        """Puts the new values into the old pattern. Returns None if they do not fit it, or are too often zero (`_HOLLOW`)."""
        assert old.packed is not None
        value, packed = run(self.evaluate, news.leaves), old.packed
        try:
            if packed.has_source:
                fits = packed.refresh(value)
            else:
                packed = pack(value.cpu(), self.format).to(value.device)
                fits = packed.has_pattern_of(old.packed)
        except FormatError:
            return None
        nonzeros = count_nonzeros(packed.values)
        if not fits or nonzeros < _HOLLOW * old.nonzeros:
            return None
        density, packed = nonzeros / value.numel(), _adopted(packed, news.leaves)
        return KnownWeight(packed, old.nonzeros, density, old.calls, old.calls, news.changes)

    def _taken_over(self, old: KnownWeight, news: News) -> KnownWeight:
        """Takes the new stored values of a SparseTensor that has the same structure. See `KnownWeight.is_placed`."""
        assert self._stored is not None and old.packed is not None
        leaves, packed, places = news.leaves, old.packed, old.places
        if places is None:
            found = self._stored.places(packed, leaves)
            if not old.whole and not self._stored.has_all(found, leaves):
                weight = self._packed(old, news, whole=True)
                return replace(weight, calls=old.calls, before=old.calls, changes=news.changes)
            places = self._stored.in_order(packed, leaves, found)
            packed = packed.with_values(packed.values) if news.counted else packed
        taken = replace(old, packed=packed, before=old.calls, changes=news.changes, places=places)
        taken.lent = taken.is_placed and news.changes >= RESTLESS and packed.values.is_cpu
        if taken.lent:
            taken.packed = packed if old.lent else packed.with_values(packed.values.new_empty(0))
        elif old.lent:
            taken.packed = self._filled(taken, leaves)
        else:
            self._stored.renew(packed, leaves, places)
        return taken

    def _filled(self, weight: KnownWeight, leaves: Sequence[torch.Tensor]) -> Packed:
        """Returns a lent weight with its values."""
        assert self._stored is not None and weight.packed is not None and weight.places is not None
        return self._stored.lent(weight.packed, leaves, weight.places)

    def _gathered(self, old: KnownWeight, news: News) -> KnownWeight | None:
        """Gathers new values of the leaf that was written, under the same mask. Returns None if the mask keeps entries that the
        packing does not have."""
        from gossamer.backend.graph.masked_values import MaskedValues  # imports the compiler

        assert old.packed is not None and self._masked is not None
        (at,), masked = news.written, old.masked
        if masked is None or masked.given != at:
            masked = MaskedValues.of(old.packed, news.leaves, at, self._masked)
        if masked is None:
            return None
        masked.renew(old.packed, news.leaves, shared=news.counted)
        return replace(old, before=old.calls, changes=news.changes, masked=masked)

    def _packed(self, old: KnownWeight | None, news: News, whole: bool = False) -> KnownWeight:
        """Packs the weight as it is now. Leaves out the positions of values for a new weight whose writes torch counts."""
        self._unsettled += 1
        leaves, densest = news.leaves, news.densest
        if self._stored is not None:
            nonzeros, values = count_nonzeros(leaves[-1]), leaves[-1].numel()
            whole = whole or _GROWN * values < nonzeros < values
            density = nonzeros / math.prod(self._stored.sizes)
            direct = news.counted and (whole or nonzeros == values) and density <= densest
            if direct and (found := self._stored.packed(self.format, leaves)) is not None:
                return KnownWeight(found[0], nonzeros, density, places=found[1], whole=True)
        value = run(self.evaluate, leaves)
        nonzeros = count_nonzeros(value)
        density = nonzeros / value.numel()
        mask = mask_of(leaves) if self._masked is not None else None
        if mask is not None:
            from gossamer.sparsity.training.kept_steps import note_mask  # only masked weights need this import

            note_mask(next(leaf for leaf in leaves if leaf.requires_grad), mask, packed=density <= densest)
        try:
            packed = _adopted(self._stored_of(value, leaves, mask, nonzeros, whole), leaves) if density <= densest else None
        except FormatError as problem:
            return KnownWeight(density=math.inf, refused=str(problem))
        settled = old is None and news.counted and self._stored is None and self._masked is None
        if settled and packed is not None and packed.pattern is None:
            packed = packed.with_values(packed.values)
        return KnownWeight(packed, nonzeros, density, whole=whole)

    def _stored_of(
        self, value: torch.Tensor, leaves: Sequence[torch.Tensor], mask: torch.Tensor | None, nonzeros: int, whole: bool
    ) -> Packed:
        """Packs a matrix: its nonzeros, or all entries that a mask keeps or that are stored, so that training may change zeros
        among them."""
        kept = None
        if mask is not None and self._masked is not None:
            kept = self._masked(mask) if nonzeros < count_nonzeros(mask) else None
        elif whole:
            kept = run(self.evaluate, [*leaves[:-1], torch.ones_like(leaves[-1])])
        if kept is not None:
            packed = pack((kept != 0).to(value.dtype).cpu(), self.format).to(value.device)
            if packed.refresh(value):
                return packed
        return pack(value.cpu(), self.format).to(value.device)


_lock = threading.Lock()
_known: WeakValueDictionary[tuple[str, str], Packings] = WeakValueDictionary()


def _capturing(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether a CUDA graph captures the calls of this thread. Nothing may wait for the GPU then."""
    return leaves[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _key(leaves: Sequence[torch.Tensor]) -> _Key:
    return leaves[0].data_ptr() if len(leaves) == 1 else tuple(map(torch.Tensor.data_ptr, leaves))


def _adopted(packed: Packed, leaves: Sequence[torch.Tensor]) -> Packed:
    """Returns a packed weight. If the dense weight is to be freed, its store keeps the packed one instead."""
    store = store_of(leaves[0]) if len(leaves) == 1 else None
    return packed if store is None else store.adopt(packed)


def _stored_matrix(evaluate: Any) -> "StoredMatrix | None":
    """Calls `StoredMatrix.of` for an expression that computes a SparseTensor. Others do not need its imports, the compiler."""
    if not isinstance(evaluate, fx.GraphModule) or all(
        str(node.target) != "gossamer.einsum.default" for node in evaluate.graph.nodes
    ):
        return None
    from gossamer.backend.graph.stored_matrix import StoredMatrix

    return StoredMatrix.of(evaluate)
