"""Operations with a sparse matrix as problems: what libraries are measured on, from SpMV to graph neural networks.

A library is a file in `libraries/` that says for each operation that it has how it is computed: a function which takes the
matrix (a SciPy csr_array, float32 with 32-bit indices, sorted, without duplicates) and the dense operands, makes ready what
a user would make ready once, and returns what is called over and over. The operations:

spmv    (a, x [K])                        A x
spmm    (a, x [K, N])                     A X
sddmm   (a, x [M, K], y [N, K])           X Yᵀ at the entries of A, one value each, in A's order
spgemm  (a)                               A Aᵀ, sparse
gcn     (a, x, w1, b1, w2, b2)            A relu(A X W1 + b1) W2 + b2; X dense, or a csr_array
search  (a, q [N, K])                     the 10 largest of each column of A Qᵀ, as rows; Q dense, or a csr_array
gat     (a, x, w [K, H F], to, source [H, F])
                                          H heads of attention of each node to its neighbours (the entries of A), concatenated:
                                          h = X W, and of i to j the softmax over j of leaky_relu(to · h_i + source · h_j)
"""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import graphs
from benchmarks.arguments import counted
from benchmarks.models import largest_error
from benchmarks.registry import BASELINES, Case, Contender, Prepared, Work, Workload, WrongResult, plugins

Way = Callable[..., Callable[[], Any]]
"""(matrix, *operands) → what computes the operation."""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation by its name, with a csr_array and dense (or sparse) operands in float32.

    exact       the same operation on operands of float64, by SciPy and NumPy
    flops       useful operations of a call
    activations bytes of the dense operands and results
    """

    name: str
    matrix: Any
    operands: tuple[Any, ...]
    exact: Callable[..., Any]
    flops: float
    activations: int
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"f32": 2e-5})
    precision: str = "f32"

    @property
    def bytes(self) -> int:
        """Of the matrix."""
        return int(self.matrix.data.nbytes + self.matrix.indices.nbytes + self.matrix.indptr.nbytes)

    def reference(self) -> tuple[Any, Work]:
        wide = (x.double().numpy() if isinstance(x, Tensor) else x.astype(np.float64) for x in self.operands)
        return self.exact(self.matrix.astype(np.float64), *wide), Work(self.flops, self.flops, self.bytes, self.activations)

    def error(self, result: Any, expected: Any) -> float:
        """Of an array or, by its entries, of a sparse matrix in any library's type."""
        if isinstance(expected, np.ndarray):
            return largest_error(torch.as_tensor(result), torch.from_numpy(expected))
        found = to_scipy(result)
        if found.shape != expected.shape:
            raise WrongResult(f"wrong result: shape {found.shape}, not {expected.shape}")
        return float(abs(found.astype(np.float64) - expected).max() / abs(expected).max())


def to_scipy(matrix: Any) -> Any:
    """A sparse matrix of SciPy, PyTorch, PyData or Gossamer as a csr_array."""
    from scipy.sparse import csr_array

    if isinstance(matrix, Tensor) and matrix.layout == torch.sparse_csr:
        parts = (matrix.values(), matrix.col_indices(), matrix.crow_indices())
        return csr_array(tuple(part.numpy() for part in parts), shape=tuple(matrix.shape))
    if isinstance(matrix, Tensor) and matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        return csr_array((matrix.values().numpy(), tuple(matrix.indices().numpy())), shape=tuple(matrix.shape))
    for convert in ("to_scipy", "to_scipy_sparse"):
        if hasattr(matrix, convert):
            return csr_array(getattr(matrix, convert)())
    return csr_array(matrix)


def rows_of(matrix: Any) -> Tensor:
    """The row of each entry of a csr_array, int64."""
    return torch.from_numpy(np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)))


def torch_csr(matrix: Any) -> Tensor:
    """A csr_array as torch.sparse CSR that shares its memory, indices of 32 bits included."""
    starts, columns, values = (torch.from_numpy(part) for part in (matrix.indptr, matrix.indices, matrix.data))
    return torch.sparse_csr_tensor(starts, columns, values, size=matrix.shape, check_invariants=False)


@dataclass(frozen=True)
class Library(Contender):
    """A contender with a way to compute each of its operations."""

    ways: Mapping[str, Way] = field(default_factory=dict)


def library(label: str, ways: Mapping[str, Way], missing: Callable[[], str | None] = lambda: None) -> Library:
    def prepare(problem: Operation) -> Prepared:
        return Prepared(ways[problem.name](problem.matrix, *problem.operands), lambda: {"weight_bytes": problem.bytes})

    return Library(label, prepare, missing=missing, ways=ways)


def having(operation: str) -> dict[str, Contender]:
    """The libraries that have an operation."""
    return {
        name: found for name, found in plugins("libraries").items() if isinstance(found, Library) and operation in found.ways
    }


def by_columns(build: Callable[[str, int], Operation], args: Namespace) -> list[Case]:
    """A case for each matrix and number of columns of what it is multiplied with."""
    return [
        Case(
            f"{name}, {counted(columns, 'column')}",
            {"matrix": name, "columns": columns},
            partial(build, name, columns),
            2e-9 * graphs.ENTRIES[name] * columns,
        )
        for name in args.matrices
        for columns in args.columns
    ]


def workload(
    operation: str,
    summary: str,
    add_arguments: Callable[[_ActionsContainer], None],
    cases: Callable[[Namespace], list[Case]],
    panels: tuple[str, ...] = (),
    across: str = "",
) -> Workload:
    """A workload that the libraries run; speed-ups are over torch.sparse."""
    return Workload(
        summary,
        add_arguments,
        cases,
        contenders=partial(having, operation),
        baselines=BASELINES["libraries"],
        panels=panels,
        across=across,
        preparing=0.5,
        gflops=2.0,
    )
