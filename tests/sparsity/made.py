"""Sparse tensors for tests: formats of every kind, and dense tensors with zeros to store in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.sparsity import SparseTensor
from gossamer.sparsity.operations.matrix_calls import ByRows

FORMATS = {
    "COO": Format.COO,
    "CSR": Format.CSR,
    "CSR int32": Format.CSR.with_widths(32, 32),
    "CSC": Format.CSC,
    "DCSR": Format.DCSR,
    "DCSC": Format.DCSC.with_widths(32, 16),
    "BSR": Format.bsr(2, 3),
    "BSC": Format.parse(
        "#sparse_tensor.encoding<{map = (i, j) -> "
        "(j floordiv 2 : dense, i floordiv 2 : compressed, i mod 2 : dense, j mod 2 : dense)}>"
    ),
    "2:4": Format.nm(2, 4),
    "hybrid": Format.parse("#sparse_tensor.encoding<{map = (i, j) -> (i : compressed, j : dense)}>"),
    "loose": Format.parse("#sparse_tensor.encoding<{map = (i, j) -> (i : dense, j : loose_compressed)}>"),
    "interleaved COO": Format.parse("#sparse_tensor.encoding<{map = (i, j) -> (i : compressed(nonunique), j : singleton)}>"),
    "dense": Format.parse("#sparse_tensor.encoding<{map = (i, j) -> (i : dense, j : dense)}>"),
}
"""Formats of matrices."""


def matrix(rows: int, columns: int, density: float = 0.3, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers (sums are exact in every type), most of them zero, at most 2 of 4 neighbours in a row."""
    return two_of_four(torch.randint(1, 4, (rows, columns)) * (torch.rand(rows, columns) < density)).to(dtype)


def two_of_four(values: Tensor) -> Tensor:
    """A matrix without the third and fourth nonzero of every four neighbours in a row."""
    groups = torch.nn.functional.pad(values, (0, -values.shape[1] % 4)).unflatten(1, (-1, 4))
    groups = groups * ((groups != 0).cumsum(-1) <= 2)
    return groups.flatten(1)[:, : values.shape[1]].contiguous()


PATTERNS: dict[str, Callable[[int, int], Tensor]] = {
    "some": matrix,
    "none": lambda rows, columns: torch.zeros(rows, columns),
    "one row": lambda rows, columns: matrix(rows, columns, 1.0) * (torch.arange(rows) == rows // 2)[:, None],
    "one full row": lambda rows, columns: torch.ones(rows, columns) * (torch.arange(rows) == 0)[:, None],
    "one": lambda rows, columns: torch.eye(rows, columns) * (torch.arange(columns) == 0),
    "diagonal": torch.eye,
}


def matrices() -> st.SearchStrategy[Tensor]:
    """Small matrices of every pattern, which 2:4 can store too."""
    sizes = st.integers(1, 9)
    return st.builds(lambda make, m, n: two_of_four(make(m, n)), st.sampled_from(list(PATTERNS.values())), sizes, sizes)


def sparse(dense: Tensor, format: Format | str = "CSR") -> SparseTensor:
    """A matrix in a format, called by its name here."""
    return SparseTensor.from_dense(dense, FORMATS[format] if isinstance(format, str) else format)


def by_rows(dense: Tensor) -> ByRows:
    """A matrix as kernels of CSR with integers of 32 bits take it."""
    matrix = SparseTensor.from_dense(dense, FORMATS["CSR int32"])
    return ByRows(*matrix.components, *dense.shape)


@contextmanager
def team_of(threads: int) -> Iterator[None]:
    """Kernels run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
