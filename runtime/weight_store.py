"""Keeps weights without a dense copy: only as a compiled kernel has packed them. The dense weight is rebuilt on demand.

A `WeightStore` is found by its `handle`, a tensor of one element that graphs carry in place of the weight:

    %w = gossamer::dense_weight(%handle, 3072, 768)       the weight, for operations that need it dense

A sparse region reads the packed weight and never runs this op. Then `adopt` frees the dense copy. When the weight changes, the
handle's version counter changes, as a parameter's would.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gossamer.dialects.errors import GossamerError
from gossamer.runtime.operations import Operation
from gossamer.runtime.packing import Packed


class WeightStore:
    """A matrix, dense or packed. Safe to use from several threads."""

    def __init__(self, dense: torch.Tensor) -> None:
        self._lock = threading.RLock()
        self._dense: torch.Tensor | None = dense.detach()
        self._packed: Packed | None = None
        self._transposed = False
        self.shape, self.dtype = tuple(dense.shape), dense.dtype
        with torch.inference_mode(False):
            self.handle = torch.zeros(1, dtype=dense.dtype, device=dense.device)
        _stores[self.handle.data_ptr()] = self

    @property
    def packed(self) -> Packed | None:
        """The packed weight; None while the dense matrix is kept."""
        return self._packed

    def copy(self) -> torch.Tensor:
        """Returns a copy of the dense matrix."""
        with self._lock:
            return self.dense() if self._dense is None else self._dense.clone()

    def dense(self) -> torch.Tensor:
        """Returns the dense matrix: the one that is kept, or a new one. Do not write to it."""
        with self._lock:
            if self._dense is not None:
                return self._dense
            assert self._packed is not None
            matrix = self._packed.unpack()
            return matrix.t().contiguous() if self._transposed else matrix

    def keep_dense(self) -> torch.Tensor:
        """Returns the dense matrix, and keeps it until the next `adopt`."""
        with self._lock:
            self._dense = self.dense()
            self._packed = None
            return self._dense

    def replace(self, dense: torch.Tensor) -> None:
        """Replaces the matrix by another one of the same shape, dtype and device."""
        if tuple(dense.shape) != self.shape:
            raise GossamerError(f"a weight of shape {self.shape} cannot become one of shape {tuple(dense.shape)}")
        with self._lock, torch.no_grad():
            self._dense, self._packed = dense.detach().to(self.handle), None
            self.handle.zero_()

    def adopt(self, packed: Packed) -> Packed:
        """Keeps `packed` instead of the dense matrix, if `packed` or its transpose gives the matrix back. Returns the packed
        weight for the kernel to read from now on.

        A matrix with a NaN stays dense, because it does not compare equal.
        """
        with self._lock:
            if self._dense is None:
                return packed
            rebuilt = packed.unpack()
            for transposed, matrix in ((False, rebuilt), (True, rebuilt.t())):
                if matrix.shape == self._dense.shape and torch.equal(matrix, self._dense):
                    self._packed, self._transposed, self._dense = packed.compact(), transposed, None
                    return self._packed
            return packed


_stores: "weakref.WeakValueDictionary[int, WeightStore]" = weakref.WeakValueDictionary()


def store_of(handle: torch.Tensor) -> WeightStore | None:
    """Returns the store whose handle this tensor is; None if it is not a handle."""
    store = _stores.get(handle.data_ptr()) if handle.numel() == 1 else None
    return store if store is not None and store.handle.untyped_storage() is handle.untyped_storage() else None


class _Reading(threading.local):
    depth = 0


_reading = _Reading()


@contextmanager
def only_reading() -> Iterator[None]:
    """Inside this context, `dense_weight` returns the matrix for reading only. The store stays packed, and keeps no dense
    copy."""
    _reading.depth += 1
    try:
        yield
    finally:
        _reading.depth -= 1


def _dense_weight(handle: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    store = store_of(handle)
    if store is None or store.shape != (rows, columns):
        raise GossamerError(
            "this graph reads a packed weight of a module that is gone, or of another process: compile the model again here"
        )
    # A graph that needs the matrix dense needs it at every call. It may reuse the memory of its result, so it gets a clone.
    return store.dense() if _reading.depth else store.keep_dense().clone()


def _fake(handle: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return handle.new_empty((rows, columns))


dense_weight = Operation(
    "dense_weight(Tensor handle, SymInt rows, SymInt columns) -> Tensor",
    _dense_weight,
    _dense_weight,
    _fake,
    tags=(torch.Tag.pt2_compliant_tag,),
).register()
