"""Matrices in slices of rows (SELL-C-sigma), for products with vectors that are computed again and again.

A row of a few entries costs more for its beginning and its end than for its entries, and where rows differ in length the
processor guesses the end wrong. With rows of one length side by side, one a lane, neither is left. Bringing a matrix into that
form takes as long as some four products, so it is done at the third product with the same matrix, if it pays:

    by rows      2 cycles an entry, 12 a row
    by slices    1.1 cycles a place, 20 a slice, 0.3 an entry to see whether its value is still the same one

Integers of the form are kept as long as the matrix lives and there is room. Values are copied, and their hash, which every
product computes anew, shows when somebody has written to them: then that product is computed by rows, and the next ones too
until the values have stayed for a while. The terms of a row are added up in another order than by rows, so that results may
differ in their last bits: under torch.use_deterministic_algorithms(True) every product is computed by rows.
"""

import ctypes
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.dialects.packing import Slices
from gossamer.runtime.region_kernel import RegionKernel
from gossamer.sparsity.row_form import RowForm

log = logging.getLogger("gossamer")

_LEAST, _MOST = 1 << 12, 1 << 24  # entries: less is done before it is looked up, of more a copy takes too much memory
_SETTLED = 3  # products with the same values
_WINDOW = 1 << 16  # rows that are sorted by length among themselves, so that what they read stays close (a multiple of lanes)
_KEPT, _BYTES = 64, 1 << 29  # matrices that are alive, and what their forms and values may take together
_DTYPES, _INTEGERS = (torch.float32, torch.float64), (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class SlicedRows:
    """The arrays of `Slices` up to the coordinates, and which entry is in each place (any one where none is)."""

    structure: tuple[Tensor, ...]
    order: Tensor

    @cached_property
    def _words(self) -> tuple[int, ...]:
        return tuple(word for array in self.structure for word in (array.data_ptr(), array.numel()))

    def bytes_with(self, values: torch.dtype) -> int:
        """What it takes, with values of this type."""
        return sum(array.nbytes for array in (*self.structure, self.order)) + self.order.numel() * values.itemsize

    def fill(self, values: Tensor, stored: Tensor) -> None:
        """Brings the values, as they are stored, into their places."""
        torch.index_select(stored.detach(), 0, self.order, out=values)

    def multiply(self, kernel: RegionKernel, stored: Tensor, values: Tensor, x: Tensor, out: Tensor) -> int:
        """Computes out = a @ x with the values in their places; the hash of those that are stored."""
        found = ctypes.c_int64()
        original = stored.data_ptr(), stored.numel() * stored.element_size() // 4
        words = (*self._words, *original, ctypes.addressof(found), 2, values.data_ptr(), values.numel())
        kernel((_Operand(words), x), out)
        return found.value

    @classmethod
    def of(cls, form: RowForm, lanes: int) -> "SlicedRows | None":
        """A matrix in slices; None if it is faster by rows."""
        columns = form.coordinates.to(torch.int32)
        if columns.dtype != form.coordinates.dtype and not bool((columns == form.coordinates).all()):
            return None
        starts_of_rows = form.positions.to(torch.int32)
        lengths = starts_of_rows.diff()
        count = lengths.numel()
        rows = _by_length(lengths)
        filled = -(-count // lanes) * lanes
        lengths = _filled(lengths.index_select(0, rows), filled, 0).view(-1, lanes)
        steps = lengths[:, 0]
        slices, places = len(lengths), int(steps.sum()) * lanes
        entries = columns.numel()
        if 1.1 * places + 20 * slices + 0.3 * entries > 2 * entries + 12 * count:
            return None
        first = _filled(starts_of_rows.index_select(0, rows), filled, 0).view(-1, lanes)
        rows = _filled(rows.int(), filled, int(rows[filled - lanes])).view(-1, lanes)
        positions = torch.zeros(slices + 1, dtype=torch.int32)
        torch.cumsum(steps, 0, out=positions[1:])
        own = torch.repeat_interleave(steps.long())
        within = torch.arange(len(own), dtype=torch.int32) - positions[:-1].index_select(0, own)
        there = lengths.index_select(0, own) > within.unsqueeze(1)
        order = torch.where(there, first.index_select(0, own) + within.unsqueeze(1), 0)
        coordinates = columns.index_select(0, order.flatten()).view(-1, lanes)
        starts = _first_if_following(coordinates, there.all(1))
        origins = _first_if_following(rows, torch.ones(slices, dtype=torch.bool))
        order = order.flatten() if form.order is None else form.order.index_select(0, order.flatten())
        log.info("a matrix of %d rows with %d entries is used again: in slices of %d rows, %.2f places an entry",
                 count, entries, lanes, places / entries)  # fmt: skip
        return cls((positions, origins, rows.flatten(), lengths.flatten(), starts, coordinates.flatten()), order)


def _by_length(lengths: Tensor) -> Tensor:
    """The rows, longest first, in each window."""
    if len(lengths) <= _WINDOW:
        return lengths.argsort(descending=True, stable=True)
    windows = torch.arange(len(lengths)) // _WINDOW
    return (windows * (int(lengths.max()) + 1) - lengths).argsort(stable=True)


def _filled(x: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, length - len(x)), value=value)


def _first_if_following(lines: Tensor, valid: Tensor) -> Tensor:
    """The first number of each line whose numbers follow each other, else -1."""
    return torch.where(valid & (lines.diff(dim=1) == 1).all(1), lines[:, 0], -1)


class _Operand(NamedTuple):
    """A sliced matrix for its kernel: the words of its arrays."""

    words: tuple[int, ...]


class _Values(NamedTuple):
    """Values that a matrix has been multiplied with, replaced as a whole, for threads share it.

    seen      where they are stored, how many, and how often they have been written to
    times     products with them, up to those after which they are copied
    copy      in the places of the form, None before that
    hash      of the stored ones, the same before and after they were copied
    """

    seen: tuple[int, ...]
    times: int
    copy: Tensor | None = None
    hash: int = 0


_NONE = _Values((), 0)


class Use:
    """How often a matrix has been multiplied with the same values; in slices of rows after a while, if that pays."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], key: "_Key") -> None:
        self._alive = [weakref.ref(each, partial(_uses.pop, key)) for each in storages]
        self._key = key
        self._values = _NONE
        self._form: SlicedRows | None = None
        self._refused = False
        self.bytes = 0

    def is_of(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether it is about the arrays in these storages."""
        return all(a() is b for a, b in zip(self._alive, storages, strict=True))

    def multiply(self, form: RowForm, stored: Tensor, x: Tensor, out: Tensor, kernel: Callable[[], RegionKernel]) -> bool:
        """Computes out = a @ x, x a contiguous vector or column, if a is in slices; else False, and out holds anything.

        stored    the values of a as its format stores them, of which `form.order` makes the values of the entries
        kernel    compiles the product with the schedule "slices"
        """
        if self._refused or torch.are_deterministic_algorithms_enabled():
            return False
        values, seen = self._values, (stored.data_ptr(), stored.numel(), version(stored))
        times = values.times + 1 if values.seen == seen else 1
        if times < _SETTLED:
            self._values = _Values(seen, times)
            return False
        run, copy, known = kernel(), values.copy, values.hash
        with suppress(KeyError):  # it has been pushed out meanwhile
            _uses.move_to_end(self._key)
        sliced = self._sliced(form, stored.dtype, run)
        if sliced is None:
            return False
        if copy is None:
            copy = stored.new_zeros(sliced.order.numel())
            known = sliced.multiply(run, stored, copy, x, out)  # a write between this and the second one is seen
            sliced.fill(copy, stored)
        same = sliced.multiply(run, stored, copy, x, out) == known
        if not same or values.copy is None:
            self._values = _Values(seen, times, copy, known) if same else _NONE
        return same

    def _sliced(self, form: RowForm, dtype: torch.dtype, kernel: RegionKernel) -> SlicedRows | None:
        if self._form is None:
            with _making:
                packing = kernel.formats[0]
                assert isinstance(packing, Slices)
                sliced = self._form or SlicedRows.of(form, packing.lanes)
                size = 0 if sliced is None else sliced.bytes_with(dtype)
                if sliced is None or size > _BYTES:
                    self._refused = True
                    return None
                self._form, self.bytes = sliced, size
                _make_room()
        return self._form


_Key = tuple[int | torch.dtype, ...]
_uses: OrderedDict[_Key, Use] = OrderedDict()  # the one used last comes last
_making = threading.Lock()


def use_of(form: RowForm, stored: Tensor) -> Use | None:
    """What is known of a matrix with values of this type; None if it stays by rows whatever happens."""
    arrays = form.positions, form.coordinates
    entries, integers = form.coordinates.numel(), form.coordinates.dtype
    if not _LEAST <= entries <= _MOST or stored.dtype not in _DTYPES or integers not in _INTEGERS:
        return None
    storages = [array.untyped_storage() for array in arrays]  # which several may have over the same memory
    facts = ((array.data_ptr(), array.numel(), array.dtype, version(array)) for array in arrays)
    key: _Key = (*(fact for each in facts for fact in each), *(each._cdata for each in storages), stored.dtype)
    use = _uses.get(key)
    if use is None or not use.is_of(storages):
        with _making:
            use = _uses[key] = Use(storages, key)
            _make_room()
    return use


def _make_room() -> None:
    """Forgets matrices, those first that have not been used for longest."""
    while len(_uses) > _KEPT or sum(use.bytes for use in _uses.copy().values()) > _BYTES:
        _uses.pop(next(iter(_uses)), None)


def version(tensor: Tensor) -> int:
    """How often a tensor has been written to, as far as torch knows."""
    return 0 if tensor.is_inference() else tensor._version
