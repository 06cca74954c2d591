"""Sparse tensors for tests: formats of every kind, and dense tensors with zeros to store in them."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from gossamer.dialects.format import Format
from gossamer.sparsity import SparseTensor

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
    values = torch.randint(1, 4, (rows, columns)) * (torch.rand(rows, columns) < density)
    groups = torch.nn.functional.pad(values, (0, -columns % 4)).unflatten(1, (-1, 4))
    groups = groups * ((groups != 0).cumsum(-1) <= 2)
    return groups.flatten(1)[:, :columns].to(dtype)


PATTERNS: dict[str, Callable[[int, int], Tensor]] = {
    "some": matrix,
    "none": lambda rows, columns: torch.zeros(rows, columns),
    "one row": lambda rows, columns: matrix(rows, columns, 1.0) * (torch.arange(rows) == rows // 2)[:, None],
    "one": lambda rows, columns: torch.eye(rows, columns) * (torch.arange(columns) == 0),
    "diagonal": torch.eye,
}


def matrices() -> st.SearchStrategy[Tensor]:
    """Small matrices of every pattern."""
    sizes = st.integers(1, 9)
    return st.builds(lambda make, m, n: make(m, n), st.sampled_from(list(PATTERNS.values())), sizes, sizes)


def sparse(dense: Tensor, format: Format | str = "CSR") -> SparseTensor:
    """A matrix in a format, called by its name here."""
    return SparseTensor.from_dense(dense, FORMATS[format] if isinstance(format, str) else format)
