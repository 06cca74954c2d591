"""Multiplies two sparse matrices into a third, in any formats. The schedule "gustavson" reads both by rows.

    c[i, j] = sum_k a[i, k] b[k, j]        SpGEMM, into CSR, or into CSC as the product of the transposes

A matrix that is not stored by rows is sorted once (see row_form): A Aᵀ sorts A once, however often it is computed. The sorted
values are kept with a copy of the stored ones, and used again while these are equal, because comparing is faster than
gathering.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.remembered import Remembered
from gossamer.sparsity.arrays.row_form import RowForm, row_form, sorted_by_rows, stored_by_rows
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Bound, Spec
from gossamer.sparsity.operations.matrix_calls import ByRows, all_dense

Kernel = Callable[[Any, Tensor], None]

_WIDE = 1 << 20  # columns up to which the kernel's work for each column is negligible
_COPIED = 1 << 24  # entries up to which sorted values are kept; more would take too much memory
_HYPERSPARSE = 64  # columns per entry of the factors; with more, most of the kernel's sums are unused


@dataclass(frozen=True)
class SparseProduct:
    """How an einsum of two sparse matrices is such a product.

    order  the numbers of the operands a and b
    rows   the dimension of a that is i, and the dimension of b that is k
    """

    order: tuple[int, int]
    rows: tuple[int, int]
    kernels: dict[tuple[tuple[int, int], ...], Kernel] = field(default_factory=dict, compare=False)

    def hypersparse(self, operands: Sequence[Bound]) -> bool:
        """Whether the kernel, which has a sum for each column, would spend most of its time on empty columns."""
        columns = operands[self.order[1]].shape[1 - self.rows[1]]
        return columns > max(_WIDE, _HYPERSPARSE * sum(operand.values.numel() for operand in operands))

    def run(self, compiled: Callable[[Spec], Kernel], operands: Sequence[Bound], result: Format, out: Tensor) -> None:
        """Runs the kernel that `compiled` returns for matrices in CSR. It writes the addresses of the result into `out`."""
        factors = [_Factor(operands[at], rows) for at, rows in zip(self.order, self.rows, strict=True)]
        widths = *(factor.widths for factor in factors), (result.pos_width, result.crd_width)
        kernel = self.kernels.get(widths)
        if kernel is None:
            a, b, c = (Format.CSR.with_widths(*each) for each in widths)
            spec = Spec((Operand("ik", a), Operand("kj", b)), Operand("ij", c))
            kernel = self.kernels[widths] = compiled(spec)
        kernel([factor.words for factor in factors], out)


@lru_cache(1024)
def countable(format: Format) -> Format:
    """Returns the format with integers of 32 bits or more, so that a kernel can count entries whose number is unknown."""
    return format.with_widths(*(width and max(width, 32) for width in (format.pos_width, format.crd_width)))


class _Factor:
    """A factor by rows, with its words for the kernel and the widths of its integers."""

    def __init__(self, operand: Bound, rows: int) -> None:
        form = _by_rows(operand, rows)
        values = _values_by_rows(form, operand.values)
        self.words = ByRows(form.positions, form.coordinates, values, operand.shape[rows], operand.shape[1 - rows])
        self.widths = form.positions.itemsize * 8, form.coordinates.itemsize * 8


def _by_rows(operand: Bound, rows: int) -> RowForm:
    assert operand.format is not None
    found = row_form(operand.format, rows, operand.shape, operand.arrays)
    return found if found is not None else sorted_by_rows(operand.format, rows, operand.shape, operand.arrays)


def _values_by_rows(form: RowForm, stored: Tensor) -> Tensor:
    if form.order is None or stored.numel() > _COPIED or not stored.is_cpu:
        return form.values(stored).contiguous()
    stored = stored.detach()
    # The form is kept with the values, so that no other form gets its id.
    return _gathered.get((stored,), (id(form),), lambda: (form, form.values(stored).contiguous()))[1]


_gathered: Remembered[tuple[RowForm, Tensor]] = Remembered(compared="all", most=8)


@lru_cache(1024)
def sparse_product(spec: Spec, dtype: torch.dtype) -> SparseProduct | None:
    """Returns how a call is such a product, None if it is not."""
    letters = [operand.letters for operand in spec.operands]
    if len(letters) != 2 or any(len(each) != 2 for each in (*letters, spec.result.letters)):
        return None
    if not dtype.is_floating_point or any(o.format is None or all_dense(o.format) for o in spec.operands):
        return None
    into = spec.result.format
    rows = next((dim for dim in range(2) if into is not None and stored_by_rows(into, dim)), None)
    summed = set(letters[0]) & set(letters[1])
    if rows is None or len(summed) != 1 or summed & set(spec.result.letters):
        return None
    a = next(number for number in range(2) if spec.result.letters[rows] in letters[number])
    b = 1 - a
    return SparseProduct((a, b), (letters[a].index(spec.result.letters[rows]), letters[b].index(summed.pop())))
