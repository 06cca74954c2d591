"""Matrices in slices of rows (SELL-C-sigma), for products with vectors that are computed again and again.

A row of a few entries costs more for its beginning and its end than for its entries, and where rows differ in length the
processor guesses the end wrong. With rows of one length side by side, one a lane, neither is left. Bringing a matrix into that
form takes as long as some four products, so it is done at the third product with the same matrix, if it pays:

    by rows      2 cycles an entry, 12 a row
    by slices    1.1 cycles a place, 20 a slice, 0.3 an entry to see whether its value is still the same one

Integers of the form are kept as long as the matrix lives and there is room; of columns the lower 16 bits, where no slice spans
more. Values are copied. Who writes to them afterwards is noticed, and that product is computed by rows, and the next ones too
until the values have stayed for a while:

    torch counts writes      to the values, and to the matrix where a compiled graph writes; both counts, and a few values, are
                             all that is looked at where no other tensor, no DLPack capsule and no NumPy array is over the same
                             memory
    a hash of the values     shows all other writes, for which every product reads the values as they are stored, too; so do
                             products of which the arrays alone are known, not the matrix

Writes through `values.data`, an import by DLPack or, compiled, `matrix.data`, if that is let go before the next product, and
through a storage are seen if they change most values: torch hides them, from autograd as well.
The terms of a row are added up in another order than by rows, so that results may differ in their last bits: under
torch.use_deterministic_algorithms(True) every product is computed by rows.
"""

import ctypes
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
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

_LEAST, _MOST = 1 << 12, 1 << 24  # entries: less is done before it is looked up, of more a copy takes too much memory
_SETTLED = 3  # products with the same values
_WINDOWS = 1 << 9, 1 << 12, 1 << 16, 1 << 20  # rows that are sorted by length among themselves (multiples of lanes)
_FILLED = 1.05  # places an entry up to which the smallest window is taken, for what its rows read is nearest
_KEPT, _BYTES = 64, 1 << 29  # matrices that are alive, and what their forms and values may take together
_DTYPES, _INTEGERS = (torch.float32, torch.float64), (torch.int32, torch.int64)

Kernels = Callable[[int], RegionKernel]
"""The kernel of the product, for coordinates of so many bits."""


@dataclass(frozen=True, eq=False)
class SlicedRows:
    """The arrays of `Slices` up to the coordinates, and which entry is in each place (any one where none is)."""

    structure: tuple[Tensor, ...]
    order: Tensor

    @property
    def width(self) -> int:
        """Bits of a coordinate."""
        return 8 * self.structure[-1].itemsize

    def bytes_with(self, values: torch.dtype) -> int:
        """What it takes, with values of this type."""
        return sum(array.nbytes for array in (*self.structure, self.order)) + self.order.numel() * values.itemsize

    def fill(self, values: Tensor, stored: Tensor) -> None:
        """Brings the values, as they are stored, into their places."""
        torch.index_select(stored.detach(), 0, self.order, out=values)

    def bound(self, kernel: RegionKernel, stored: Tensor | None, *words: int) -> Callable[..., None]:
        """The product as a function of addresses and lengths: of the hash, the values in their places, x and the result.

        The hash is that of the values as they are stored, if they are given. The first words may be given already.
        """
        original = (0, 0) if stored is None else (stored.data_ptr(), stored.numel() * stored.element_size() // 4)
        return kernel.bound((*self._words, *original, *words))

    @cached_property
    def _words(self) -> tuple[int, ...]:
        return tuple(word for array in self.structure for word in (array.data_ptr(), array.numel()))

    @classmethod
    def of(cls, form: RowForm, lanes: int, windows: bool) -> "SlicedRows | None":
        """A matrix in slices, its coordinates in 16 bits if no slice spans more columns; None if it is faster by rows.

        `windows` says that the kernel picks columns that are near each other out of two vectors.
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
        # Columns near each other are counted from where two vectors begin that hold them, which end with the last column.
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
    """The rows, longest first, in each window."""
    if len(lengths) <= window:
        return lengths.argsort(descending=True, stable=True)
    windows = torch.arange(len(lengths)) // window
    return (windows * (int(lengths.max()) + 1) - lengths).argsort(stable=True)


def _lines(x: Tensor, lanes: int, value: int) -> Tensor:
    """A line for so many elements, the last one filled up."""
    return torch.nn.functional.pad(x, (0, -len(x) % lanes), value=value).view(-1, lanes)


def _first_if_following(lines: Tensor, valid: Tensor) -> Tensor:
    """The first number of each line whose numbers follow each other, else -1."""
    return torch.where(valid & (lines.diff(dim=1) == 1).all(1), lines[:, 0], -1)


class _Values(NamedTuple):
    """Values that a matrix has been multiplied with, replaced as a whole, for threads share it.

    seen    where they are stored, how many, and how often they have been written to
    times   products with them, up to those after which they are copied
    stored  a weak reference to the tensor of the stored ones, and `storage` to its storage
    copy    in the places of the form, `words` its address and length
    hash    of the stored ones before they were copied
    hashed  the product, see `SlicedRows.bound`, which hashes them again
    alone   the product which reads the copy alone, if torch counts what is written to the stored ones
    written how often the matrix had been written to when the hash was last right, None if that is not known
    sample  of the stored ones
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
    written: int | None = None
    sample: Sample = (None, None)


_NONE = _Values((), 0)


class Use:
    """How often a matrix has been multiplied with the same values; in slices of rows after a while, if that pays."""

    def __init__(self) -> None:
        self._values = _NONE
        self._form: SlicedRows | None = None
        self._refused = False
        self.bytes = 0
        self.last = next(_turns)

    def multiply(
        self, form: RowForm, stored: Tensor, x: Tensor, out: Tensor, kernel: Kernels, written: int | None = None
    ) -> bool:
        """Computes out = a @ x, x a contiguous vector or column, if a is in slices; else False, and out holds anything.

        `stored` are the values of a as its format stores them, of which `form.order` makes the values of the entries;
        `written` is how often a, the SparseTensor, has been written to: without it, the values are hashed at every product.
        """
        values = self._values
        if torch.are_deterministic_algorithms_enabled():
            return False
        storage, where = stored.untyped_storage(), (x.data_ptr(), x.numel(), out.data_ptr(), out.numel())
        if (
            values.alone is not None
            and values.written == written is not None
            and values.stored() is stored
            and values.storage() is storage
            and values.seen == (stored.data_ptr(), stored.numel(), stored._version)
            and values.sample[0] == values.sample[1]
            and _writes_are_counted(stored, storage)
        ):
            self.last = next(_turns)
            values.alone(*where)
            return True
        if values.hashed is None or values.seen != (stored.data_ptr(), stored.numel(), version(stored)):
            settled = not self._refused and self._settle(form, stored, where, kernel, written)
            return settled and self.multiply(form, stored, x, out, kernel, written)
        self.last, found = next(_turns), ctypes.c_int64()
        values.hashed(ctypes.addressof(found), 2, *values.words, *where)
        if found.value != values.hash:
            self._values = _NONE
        elif values.written != written is not None:
            self._values = values._replace(written=written)
        return found.value == values.hash

    def _settle(self, form: RowForm, stored: Tensor, where: tuple[int, ...], kernel: Kernels, written: int | None) -> bool:
        """Counts products with the same values; after a few it copies them, and is True.

        `where` are the addresses and lengths of x and of a result, which holds anything afterwards.
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
        # A write after this is seen at the next product, for it changes the hash, or a count of writes.
        hashed(ctypes.addressof(found), 2, *words, *where)
        sliced.fill(copy, stored)
        counted = not stored.is_inference() and _references_tell()
        alone = sliced.bound(run, None, ctypes.addressof(_NOT_ASKED), 2, *words) if counted else None
        alive = weakref.ref(stored), weakref.ref(stored.untyped_storage())
        self._values = _Values(seen, values.times, *alive, copy, words, found.value, hashed, alone, written, sample)
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


def _writes_are_counted(stored: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether nobody can write to a tensor's memory and torch not count it: no other tensor is over it, nor NumPy ever was,
    and nobody but Python has the tensor (autograd may, and who exports it by DLPack)."""
    references: tuple[int, int] = tensor_references(stored), storage_references(storage._cdata)
    return references == _ALONE and storage.resizable()


@cache
def _references_tell() -> bool:
    """Whether torch, whose functions for that are not public, counts references as `_writes_are_counted` takes it."""
    try:
        own, shared, lent = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        others = shared.detach(), torch.from_dlpack(lent)
        counted = [_writes_are_counted(each, each.untyped_storage()) for each in (own, shared, lent)]
        del others
    except AttributeError:
        return False
    return counted == [True, False, False]


_NOT_ASKED = ctypes.c_int64()  # where the hash of nothing goes
_ALONE = 1, 2  # Python has the tensor; the tensor and Python have its storage


_uses: Remembered[Use] = Remembered()
_turns = itertools.count(1)
_making = threading.Lock()


def use_of(form: RowForm, stored: Tensor) -> Use | None:
    """What is known of a matrix with values of this type; None if it stays by rows whatever happens."""
    entries, integers = form.coordinates.numel(), form.coordinates.dtype
    if not _LEAST <= entries <= _MOST or stored.dtype not in _DTYPES or integers not in _INTEGERS:
        return None
    return _uses.get((form.positions, form.coordinates), (stored.dtype,), _new_use)


def _new_use() -> Use:
    _make_room(_KEPT - 1)
    return Use()


def _make_room(most: int = _KEPT) -> None:
    """Forgets matrices, those first that have not been used for longest."""
    by_use = sorted(_uses.items(), key=lambda each: each[1].last)
    count, size = len(by_use), sum(use.bytes for _, use in by_use)
    for key, use in by_use:
        if count <= most and size <= _BYTES:
            return
        _uses.forget(key)
        count, size = count - 1, size - use.bytes


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to, as far as torch knows."""
    return 0 if tensor.is_inference() else tensor._version
