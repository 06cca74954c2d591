"""Makes further products a @ x of a matrix faster: everything that does not change between calls is kept.

A small product takes less time than its checks. So the first product with a CSR matrix stores a `Repeated` in the matrix. The
next products only check what may have changed: the addresses of its arrays, writes to its structure, and x. If the matrix has
changed, its `Repeated` is dropped, and the next product stores another.
"""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gossamer.runtime.memory.warm_memory import LEAST, empty_like
from gossamer.sparsity.arrays.row_form import RowForm
from gossamer.sparsity.arrays.sliced_rows import Use, use_of
from gossamer.sparsity.operations.calls import Call
from gossamer.sparsity.operations.dispatch import PLAIN, is_marked, watched
from gossamer.sparsity.operations.matrix_calls import ByRows
from gossamer.sparsity.tensor.sparse_tensor import SparseTensor


class Repeated:
    """A matrix in CSR on the CPU, and the calls of its products with vectors and with matrices."""

    __slots__ = ("_arrays", "_by_rows", "_calls", "_columns", "_dtype", "_form", "_identity", "_rows", "_use")

    def __init__(self, matrix: SparseTensor, calls: dict[int, Call]) -> None:
        """`calls` are the prepared calls of the product, by the number of dimensions of x.

        The arrays of the matrix must be contiguous. None may be made in inference mode, where torch counts no writes.
        """
        positions, coordinates, values = self._arrays = matrix.components
        self._identity = _identity(positions, coordinates, values)
        self._rows, self._columns = matrix.shape
        self._by_rows = ByRows(positions, coordinates, values, self._rows, self._columns)
        self._form, self._calls, self._dtype = RowForm(positions, coordinates, None), calls, values.dtype
        self._use: Callable[[], Use | None] = lambda: None  # a weak reference, because only a few uses are kept
        matrix._repeated = self

    def times(self, matrix: SparseTensor, x: Tensor) -> Tensor | None:
        """Returns matrix @ x, None if the matrix has changed or x does not fit. Nothing may observe operations."""
        positions, coordinates, values = self._arrays
        if matrix._stored is not values or _identity(positions, coordinates, values) != self._identity:
            matrix._repeated = None
            return None
        if (
            type(x) not in PLAIN
            or x.dtype is not self._dtype
            or x.layout is not torch.strided
            or not (x.is_cpu and x.is_contiguous())
            or is_marked(x)
        ):
            return None
        shape = x.shape
        call = self._calls.get(len(shape))
        if call is None or shape[0] != self._columns:
            return None
        with torch.DisableTorchFunctionSubclass():  # else each attribute of a subclass calls __torch_function__
            if torch.is_grad_enabled() and (matrix.requires_grad or x.requires_grad):
                return None
        alike = self._rows == self._columns and x.nbytes < LEAST
        out = torch.empty_like(x) if alike else empty_like(x, self._rows, *shape[1:])  # torch's empty_like is faster
        if len(shape) == 1 or shape[1] == 1:
            use = self._use()
            if use is None and (use := use_of(self._form, values)) is not None:
                self._use = weakref.ref(use)
            if use is not None:
                use.multiply(self._form, values, x, out, call.sliced, partial(self._multiply, call, x, out))
                return out
        if out.numel():
            self._multiply(call, x, out)
        return out

    def _multiply(self, call: Call, x: Tensor, out: Tensor) -> None:
        """Computes a product by rows."""
        call.kernel(self._form)((self._by_rows, x), out)


def _identity(positions: Tensor, coordinates: Tensor, values: Tensor) -> tuple[int, ...]:
    return positions.data_ptr(), positions._version, coordinates.data_ptr(), coordinates._version, values.data_ptr()


def matmul_again(left: SparseTensor, right: Tensor) -> Tensor | None:
    """Returns left @ right by the `Repeated` of an earlier product, None if there is none or it cannot be used."""
    found = left._repeated
    if found is None or watched() or torch.is_autocast_enabled("cpu"):
        return None
    product: Tensor | None = found.times(left, right)
    return product


SparseTensor.matmul_again = staticmethod(matmul_again)
