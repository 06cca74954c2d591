"""Stores matrices in slices of rows (SELL-C-sigma), for repeated products with vectors.

In CSR, a row of a few entries costs more for its beginning and its end than for its entries. The processor also mispredicts the
end if rows differ in length. A slice has rows of similar length side by side, one in each lane, and avoids both costs. Making
the slices takes as long as about four products. So it is done at the third product with the same matrix, if it pays:

    by rows      2 cycles an entry, 12 a row
    by slices    1.1 cycles a place, 20 a slice, 0.3 an entry to check whether its value is still the same

The integers of the slices are kept as long as the matrix lives and there is room. Coordinates have 16 bits if no slice spans
more columns. Values are copied. If the stored values have changed, that product is computed by rows, and so are the next ones
until the values have stayed the same for a while. Changes are found in two ways:

    the count of writes      torch counts writes to the values (counted_writes.py). Only the count and a few values are compared
                             if no other tensor, DLPack capsule or NumPy array shares the memory
    a hash of the values     finds all other writes. Every product then also reads the stored values. That may take longer than
                             a product by rows, so both are timed once, and the faster one stays

torch hides some writes, also from autograd: through a storage; and through `values.data`, an import by DLPack or, compiled,
`matrix.data`, if these objects no longer exist at the next product. They are found only if they change most values.
Slices add the terms of a row in another order, so the last bits of results may differ. Under
torch.use_deterministic_algorithms(True) every product is computed by rows.
"""

import ctypes
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.runtime.region_kernel import RegionKernel
from gossamer.runtime.remembered import Remembered
from gossamer.runtime.sample import Sample, sample_of
from gossamer.runtime.target import host
from gossamer.runtime.torch_internals import storage_references, tensor_references
from gossamer.sparsity.arrays.row_form import RowForm

log = logging.getLogger("gossamer")

_LEAST, _MOST = 1 << 12, 1 << 24  # entries: for fewer a look-up is too slow, for more a copy is too large
_SETTLED = 3  # products with the same values, before they are copied
_WINDOWS = 1 << 9, 1 << 12, 1 << 16, 1 << 20  # rows in a window, which are sorted by length (multiples of lanes)
_FILLED = 1.05  # places per entry; the first window with at most so many is taken, as rows of small windows read near columns
_ROUNDS = 3  # of timing a product both ways
_KEPT, _BYTES = 64, 1 << 29  # the most matrices, and the bytes of their slices and values together
_DTYPES, _INTEGERS = (torch.float32, torch.float64), (torch.int32, torch.int64)

Kernels = Callable[[int], RegionKernel]
"""Returns the kernel of the product, for coordinates with a number of bits."""


@dataclass(frozen=True, eq=False)
class SlicedRows:
    """The arrays of `Slices` up to the coordinates, and the number of the entry in each place (any for an empty place)."""

    structure: tuple[Tensor, ...]
    order: Tensor

    @property
    def width(self) -> int:
        """The bits of a coordinate."""
        return 8 * self.structure[-1].itemsize

    def bytes_with(self, values: torch.dtype) -> int:
        """Returns the bytes of all arrays, with values of this dtype."""
        return sum(array.nbytes for array in (*self.structure, self.order)) + self.order.numel() * values.itemsize

    def fill(self, values: Tensor, stored: Tensor) -> None:
        """Writes the stored values to their places in `values`."""
        torch.index_select(stored.detach(), 0, self.order, out=values)

    def bound(self, kernel: RegionKernel, stored: Tensor | None, *words: int) -> Callable[..., None]:
        """Returns the product as a function of addresses and lengths of: the hash, the values in their places, x, the result.

        The product computes the hash of the values in `stored`, if given. `words` are the first arguments, if given.
        """
        original = (0, 0) if stored is None else (stored.data_ptr(), stored.numel() * stored.element_size() // 4)
        return kernel.bound((*self._words, *original, *words))

    @cached_property
    def _words(self) -> tuple[int, ...]:
        return tuple(word for array in self.structure for word in (array.data_ptr(), array.numel()))

    @classmethod
    def of(cls, form: RowForm, lanes: int, windows: bool) -> "SlicedRows | None":
        """Returns a matrix in slices, with coordinates of 16 bits if no slice spans more columns; None if rows are faster.

        `windows` says that the kernel selects columns that are near each other from two vectors of x.
        """
        columns = form.coordinates.to(torch.int32)
        if columns.dtype != form.coordinates.dtype and not bool((columns == form.coordinates).all()):
            return None
        starts_of_rows, entries = form.positions.to(torch.int32), columns.numel()
        all_lengths = starts_of_rows.diff()
        count = all_lengths.numel()
        for window in _WINDOWS:
            rows = _by_length(all_lengths, window)
            lengths = _lines(all_lengths.index_select(0, rows), lanes, 0)
            steps = lengths[:, 0]
            slices, places = len(lengths), int(steps.sum()) * lanes
            if places <= _FILLED * entries or count <= window:
                break
        if 1.1 * places + 20 * slices + 0.3 * entries > 2 * entries + 12 * count:
            return None
        begins = _lines(starts_of_rows.index_select(0, rows), lanes, 0)
        rows = _lines(rows.int(), lanes, int(rows[(slices - 1) * lanes]))
        positions = torch.zeros(slices + 1, dtype=torch.int32)
        torch.cumsum(steps, 0, out=positions[1:])
        own = torch.repeat_interleave(steps.long())
        within = torch.arange(len(own), dtype=torch.int32) - positions[:-1].index_select(0, own)
        there = lengths.index_select(0, own) > within.unsqueeze(1)
        order = torch.where(there, begins.index_select(0, own) + within.unsqueeze(1), 0)
        read = columns.index_select(0, order.flatten()).view(-1, lanes)
        least = torch.where(there, read, torch.iinfo(torch.int32).max).amin(1)
        bases = torch.zeros(slices, dtype=torch.int32).scatter_reduce_(0, own, least, "amin", include_self=False)
        # Near columns are counted from the begin of two vectors that contain them. The vectors end at most at the last column.
        latest = int(columns.max()) + 1 - 2 * lanes if windows and entries else -1
        windows_begin = least.clamp(max=latest)
        near = (torch.where(there, read, 0).amax(1) - windows_begin < 2 * lanes) & (latest >= 0)
        bases_of_steps = torch.where(near, windows_begin, bases.index_select(0, own))
        coordinates = torch.where(there, read - bases_of_steps.unsqueeze(1), 0)
        if not entries or int(coordinates.max()) < 1 << 16:
            coordinates = coordinates.to(torch.int16)  # unsigned: the upper half wraps around
        starts = _first_if_following(read, there.all(1))
        starts = torch.where((starts < 0) & near, -2 - windows_begin, starts)
        origins = _first_if_following(rows, torch.ones(slices, dtype=torch.bool))
        order = order.flatten() if form.order is None else form.order.index_select(0, order.flatten())
        log.info("a matrix of %d rows with %d entries is used again: in slices of %d rows, %.2f places an entry",
                 count, entries, lanes, places / entries)  # fmt: skip
        of_slices = positions, lengths[:, -1].contiguous(), origins, bases, rows.flatten(), lengths.flatten()
        return cls((*of_slices, starts, coordinates.flatten()), order)


def _by_length(lengths: Tensor, window: int) -> Tensor:
    """Returns the rows in each window, longest first."""
    if len(lengths) <= window:
        return lengths.argsort(descending=True, stable=True)
    windows = torch.arange(len(lengths)) // window
    return (windows * (int(lengths.max()) + 1) - lengths).argsort(stable=True)


def _lines(x: Tensor, lanes: int, value: int) -> Tensor:
    """Returns x in lines of `lanes` elements; the last line is padded with `value`."""
    return torch.nn.functional.pad(x, (0, -len(x) % lanes), value=value).view(-1, lanes)


def _first_if_following(lines: Tensor, valid: Tensor) -> Tensor:
    """Returns the first number of each valid line of consecutive numbers, -1 for other lines."""
    return torch.where(valid & (lines.diff(dim=1) == 1).all(1), lines[:, 0], -1)


class _Values(NamedTuple):
    """The values of a matrix in its last products. Replaced as a whole, because threads share it.

    seen    the address, the number, and the count of writes of the stored values
    times   products with these values, counted until they are copied
    stored  a weak reference to the tensor of the stored values; `storage`: to its storage
    copy    the values in the places of the slices; `words`: its address and length
    hash    the hash of the stored values before they were copied
    hashed  the product that hashes the stored values again, see `SlicedRows.bound`
    alone   the product that reads only the copy, if torch counts writes to the stored values
    sample  a few of the stored values
    """

    seen: tuple[int, ...]
    times: int
    stored: Callable[[], Tensor | None] = lambda: None
    storage: Callable[[], torch.UntypedStorage | None] = lambda: None
    copy: Tensor | None = None
    words: tuple[int, int] = 0, 0
    hash: int = 0
    hashed: Callable[..., None] | None = None
    alone: Callable[..., None] | None = None
    sample: Sample = (None, None)


_NONE = _Values((), 0)


class Use:
    """Counts the products of a matrix with the same values, and makes slices of rows after a few, if that pays."""

    def __init__(self) -> None:
        self._values = _NONE
        self._form: SlicedRows | None = None
        self._refused = False
        self._hash_pays: dict[int, bool] = {}  # by the number of threads
        self.bytes = 0
        self.last = next(_turns)

    def multiply(
        self,
        form: RowForm,
        stored: Tensor,
        x: Tensor,
        out: Tensor,
        kernel: Kernels,
        by_rows: Callable[[], None],
    ) -> None:
        """Computes out = a @ x for a contiguous vector or column x: by slices if that is faster, else by `by_rows`.

        stored   the values of a in the order of its format; `form.order` selects the values of the entries
        by_rows  computes out by rows
        """
        if not self._by_slices(form, stored, (x.data_ptr(), x.numel(), out.data_ptr(), out.numel()), kernel, by_rows):
            by_rows()

    def _by_slices(
        self,
        form: RowForm,
        stored: Tensor,
        where: tuple[int, ...],
        kernel: Kernels,
        by_rows: Callable[[], None],
    ) -> bool:
        """Computes a product by slices. If it returns False, the result is undefined.

        `where` has the addresses and lengths of x and of the result.
        """
        values = self._values
        if torch.are_deterministic_algorithms_enabled():
            return False
        storage = stored.untyped_storage()
        counted = not stored.is_inference() and _references_tell() and _writes_are_counted(stored, storage)
        if (
            counted
            and values.alone is not None
            and values.stored() is stored
            and values.storage() is storage
            and values.seen == (stored.data_ptr(), stored.numel(), stored._version)
            and values.sample[0] == values.sample[1]
        ):
            self.last = next(_turns)
            values.alone(*where)
            return True
        if not counted and not self._hash_pays.get(torch.get_num_threads(), True):
            return False
        if values.hashed is None or values.seen != (stored.data_ptr(), stored.numel(), version(stored)):
            settled = not self._refused and self._settle(form, stored, where, kernel)
            return settled and self._by_slices(form, stored, where, kernel, by_rows)
        if not counted and not self._pays(values, where, by_rows):
            self._values = _NONE
            return False
        self.last, found = next(_turns), ctypes.c_int64()
        values.hashed(ctypes.addressof(found), 2, *values.words, *where)
        if found.value != values.hash:
            self._values = _NONE
        return found.value == values.hash

    def _pays(self, values: _Values, where: tuple[int, ...], by_rows: Callable[[], None]) -> bool:
        """Returns whether a product by slices with a hash is as fast as one by rows. Times both once for each number of
        threads."""
        threads = torch.get_num_threads()
        known = self._hash_pays.get(threads)
        if known is None:
            assert values.hashed is not None
            by_slices: Callable[[], None] = partial(values.hashed, ctypes.addressof(_NOT_ASKED), 2, *values.words, *where)
            times: dict[Callable[[], None], list[float]] = {by_slices: [], by_rows: []}
            clock = _clock(threads)
            for _ in range(_ROUNDS):
                for run, own in times.items():
                    begin = clock()
                    run()
                    own.append(clock() - begin)
            known = self._hash_pays[threads] = min(times[by_slices]) <= min(times[by_rows])
        return known

    def _settle(self, form: RowForm, stored: Tensor, where: tuple[int, ...], kernel: Kernels) -> bool:
        """Counts products with the same values. After a few it copies the values and returns True.

        `where` has the addresses and lengths of x and of a result, which is undefined afterwards.
        """
        values, seen = self._values, (stored.data_ptr(), stored.numel(), version(stored))
        if values.seen != seen or values.times + 1 < _SETTLED:
            self._values = _Values(seen, values.times + 1 if values.seen == seen else 1)
            return False
        sliced = self._form or self._sliced(form, stored.dtype)
        if sliced is None:
            return False
        sample = sample_of(stored)
        run, copy, found = kernel(sliced.width), stored.new_zeros(sliced.order.numel()), ctypes.c_int64()
        words, hashed = (copy.data_ptr(), copy.numel()), sliced.bound(run, stored)
        # The next product finds a write after this line, because it changes the hash or a count of writes.
        hashed(ctypes.addressof(found), 2, *words, *where)
        sliced.fill(copy, stored)
        counted = not stored.is_inference() and _references_tell()
        alone = sliced.bound(run, None, ctypes.addressof(_NOT_ASKED), 2, *words) if counted else None
        alive = weakref.ref(stored), weakref.ref(stored.untyped_storage())
        self._values = _Values(seen, values.times, *alive, copy, words, found.value, hashed, alone, sample)
        return True

    def _sliced(self, form: RowForm, dtype: torch.dtype) -> SlicedRows | None:
        with _making:
            if self._form is None:
                bits = host().vector_bits
                sliced = SlicedRows.of(form, bits // (8 * dtype.itemsize), bits >= 512)
                size = 0 if sliced is None else sliced.bytes_with(dtype)
                self._refused = sliced is None or size > _BYTES
                if not self._refused:
                    self._form, self.bytes, self.last = sliced, size, next(_turns)
                    _make_room()
            return self._form


def _clock(threads: int) -> Callable[[], float]:
    """Returns the clock for times of products. With one thread, other processes do not count."""
    return time.thread_time if threads == 1 else time.perf_counter


def _writes_are_counted(stored: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether torch counts all writes to a tensor's memory.

    It does if no other tensor shares the memory, NumPy never did, and only Python references the tensor. Autograd or a DLPack
    capsule would hold further references.
    """
    references: tuple[int, int] = tensor_references(stored), storage_references(storage._cdata)
    return references == _ALONE and storage.resizable()


@cache
def _references_tell() -> bool:
    """Whether torch's private functions count references as `_writes_are_counted` expects."""
    try:
        own, shared, lent = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        others = shared.detach(), torch.from_dlpack(lent)
        counted = [_writes_are_counted(each, each.untyped_storage()) for each in (own, shared, lent)]
        del others
    except AttributeError:
        return False
    return counted == [True, False, False]


_NOT_ASKED = ctypes.c_int64()  # receives a hash that nobody needs
_ALONE = 1, 2  # references to a tensor (by Python) and to its storage (by the tensor and Python)


_uses: Remembered[Use] = Remembered()
_turns = itertools.count(1)
_making = threading.Lock()


def use_of(form: RowForm, stored: Tensor) -> Use | None:
    """Returns the record of a matrix with values of this dtype, None if it always stays by rows."""
    entries, integers = form.coordinates.numel(), form.coordinates.dtype
    if not _LEAST <= entries <= _MOST or stored.dtype not in _DTYPES or integers not in _INTEGERS:
        return None
    return _uses.get((form.positions, form.coordinates), (stored.dtype,), _new_use)


def _new_use() -> Use:
    _make_room(_KEPT - 1)
    return Use()


def _make_room(most: int = _KEPT) -> None:
    """Forgets the matrices that have not been used for longest, until the others fit the limits."""
    by_use = sorted(_uses.items(), key=lambda each: each[1].last)
    count, size = len(by_use), sum(use.bytes for _, use in by_use)
    for key, use in by_use:
        if count <= most and size <= _BYTES:
            return
        _uses.forget(key)
        count, size = count - 1, size - use.bytes


def version(tensor: Tensor) -> int:
    """Returns torch's count of writes to a tensor."""
    return 0 if tensor.is_inference() else tensor._version
