"""Recognises calls that are products of one sparse matrix with dense ones, in any format and order of letters.

    y[r, n] = sum_c a[r, c] x[c, n]        RowProduct     SpMM, SpMV and their transposes, by the schedule "rows"
    v[p] = sum_k x[r, k] y[c, k]           RowSample      SDDMM at the entries p = (r, c) of a, by the schedule "dots", or,
                                                          as the gradient of a weight, by "tokens" (see token_samples.py)

The matrix is read by rows (see row_form), and dense matrices are transposed if necessary. `of` recognises a call. The reference
computes calls that are neither, or too large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.runtime.memory.warm_memory import empty, empty_like
from gossamer.sparsity.arrays.row_form import RowForm, row_form, stored_by_rows
from gossamer.sparsity.arrays.sliced_rows import Kernels as SlicesKernels
from gossamer.sparsity.arrays.sliced_rows import use_of
from gossamer.sparsity.compiler.contract_ir import Operand
from gossamer.sparsity.compiler.operands import Spec
from gossamer.sparsity.operations.token_samples import FEWEST, sampled_over_tokens

Kernels = Callable[[RowForm], Callable[[Any, Tensor], None]]
"""Returns the kernel for a matrix by rows, whose integers have certain widths."""


class ByRows:
    """A sparse matrix as the operand of a kernel for CSR: addresses and lengths of its arrays, and its sizes."""

    __slots__ = ("components", "words")

    def __init__(self, positions: Tensor, coordinates: Tensor, values: Tensor, rows: int, columns: int) -> None:
        self.components = positions, coordinates, values  # words are addresses, so the arrays must outlive the call
        entries = coordinates.numel()
        words = positions.data_ptr(), positions.numel(), coordinates.data_ptr(), entries, values.data_ptr(), entries
        self.words = (*words, rows, columns)


@dataclass(frozen=True)
class RowProduct:
    """y[r, n] = sum_c a[r, c] x[c, n], or y[r] = sum_c a[r, c] x[c].

    matrix      the number of the operand a
    rows        the dimension of a that is r
    direct      whether a is stored by rows
    vector      whether x and y are vectors
    x_across    whether x is [n, c]; y_across: whether y is [n, r]
    """

    format: Format
    matrix: int
    rows: int
    direct: bool
    vector: bool
    x_across: bool
    y_across: bool

    @classmethod
    def of(cls, spec: Spec) -> Self | None:
        """Returns how a call of einsum is such a product, None if it is not."""
        sparse = [number for number, operand in enumerate(spec.operands) if operand.format is not None]
        if len(spec.operands) != 2 or len(sparse) != 1 or spec.result.format is not None:
            return None
        a, x, y = spec.operands[sparse[0]], spec.operands[1 - sparse[0]].letters, spec.result.letters
        summed = [letter for letter in a.letters if letter in x]
        if a.format is None or len(a.letters) != 2 or len(summed) != 1 or summed[0] in y or all_dense(a.format):
            return None
        rows = 1 - a.letters.index(summed[0])
        others = x.replace(summed[0], "")
        if len(others) > 1 or sorted(y) != sorted(a.letters[rows] + others):
            return None
        direct = stored_by_rows(a.format, rows)
        return cls(a.format, sparse[0], rows, direct, not others, x.startswith(others or " "), y.startswith(others or " "))

    def canonical(self, format: Format) -> Spec:
        """Returns the spec for which the kernel is compiled, with a in CSR with the widths of `format`."""
        n = "" if self.vector else "n"
        return Spec((Operand("rc", format), Operand(f"c{n}")), Operand(f"r{n}"))

    def run(
        self, kernels: Kernels, arrays: Sequence[Tensor], sizes: Sequence[int], sliced: SlicesKernels | None = None
    ) -> Tensor | None:
        """Returns the result of a call, None if the matrix is too large to be sorted by rows.

        `sliced` returns the kernel for a matrix in slices of rows, which is used for vectors if it is faster.
        """
        *given, x = arrays if self.matrix == 0 else (*arrays[1:], arrays[0])
        rows, columns = sizes[self.rows], sizes[1 - self.rows]
        if self.direct:
            form: RowForm | None = RowForm(given[0].contiguous(), given[1].contiguous(), None)
        else:
            form = row_form(self.format, self.rows, sizes, given)
        if form is None:
            return None
        x = (x.t() if self.x_across else x).contiguous()
        out = (empty if x.is_cpu else x.new_empty)([rows] if self.vector else [rows, x.shape[1]], dtype=x.dtype)

        def by_rows() -> None:
            values = form.values(given[-1]).contiguous()
            kernels(form)((ByRows(form.positions, form.coordinates, values, rows, columns), x), out)

        use = None
        if sliced is not None and (self.vector or x.shape[1] == 1):
            stored = given[-1].contiguous()
            use = use_of(form, stored)
            if use is not None:
                use.multiply(form, stored, x, out, sliced, by_rows)
        if use is None and out.numel():
            by_rows()
        return out.t().contiguous() if self.y_across else out


@dataclass(frozen=True)
class RowSample:
    """v[p] = sum_k of the product of dense factors, of one or two dimensions each, at the entries p of a matrix.

    across    whether k comes first in each factor, so that it is transposed
    """

    format: Format
    rows: int
    letters: tuple[str, ...]
    across: tuple[bool, ...]

    @classmethod
    def of(cls, spec: Spec) -> Self | None:
        """Returns how a call of sample is such a product, None if it is not."""
        pattern, *factors = spec.operands
        if pattern.format is None or len(pattern.letters) != 2 or all_dense(pattern.format):
            return None
        reduced = {letter for factor in factors for letter in factor.letters} - set(pattern.letters)
        if len(reduced) != 1 or any(len(factor.letters) > 2 or factor.format for factor in factors):
            return None
        k = reduced.pop()
        rows = 1 if stored_by_rows(pattern.format, 1) else 0
        names = {pattern.letters[rows]: "r", pattern.letters[1 - rows]: "c", k: "k"}
        across = tuple(len(factor.letters) == 2 and factor.letters[0] == k for factor in factors)
        letters = ["".join(names[letter] for letter in factor.letters) for factor in factors]
        if any(sorted(each) == ["c", "r"] for each in letters):
            return None
        turned = (each[::-1] if turn else each for each, turn in zip(letters, across, strict=True))
        return cls(pattern.format, rows, tuple(turned), across)

    @property
    def over_tokens(self) -> bool:
        """Whether it is sum_t x[t, r] y[t, c], such as the gradient of a weight."""
        return all(self.across) and sorted(self.letters) == ["ck", "rk"]

    def canonical(self, format: Format) -> Spec:
        """Returns the spec for which the kernel is compiled, with the pattern in CSR with the widths of `format`."""
        return Spec((Operand("rc", format), *(Operand(letters) for letters in self.letters)), Operand("p"))

    def run(self, kernels: Kernels, arrays: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
        """Returns the result of a call, None if the pattern is too large to be sorted by rows."""
        count = len(arrays) - len(self.letters)
        given, factors = arrays[:count], arrays[count:]
        form = row_form(self.format, self.rows, sizes, given)
        if form is None:
            return None
        if self.over_tokens and factors[0].is_cpu and factors[0].shape[0] >= FEWEST and form.coordinates.numel():
            by_row = dict(zip(self.letters, factors, strict=True))
            x, y = by_row["rk"].contiguous(), by_row["ck"].contiguous()
            return form.scatter(sampled_over_tokens(form.positions, form.coordinates, x, y), given[-1].numel())
        turned = [(f.t() if turn else f).contiguous() for f, turn in zip(factors, self.across, strict=True)]
        entries = form.coordinates.numel()
        out = empty_like(given[-1], entries) if given[-1].is_cpu else given[-1].new_empty(entries)
        if entries:
            # The kernel does not read the values of a pattern.
            pattern = ByRows(form.positions, form.coordinates, out, sizes[self.rows], sizes[1 - self.rows])
            kernels(form)((pattern, *turned), out)
        return form.scatter(out, given[-1].numel())


def all_dense(format: Format) -> bool:
    """Whether a format stores all elements."""
    return all(level.kind == "dense" for level in format.levels)
