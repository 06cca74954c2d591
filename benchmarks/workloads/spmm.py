"""SpMM: Y = A X, X with a few columns or many."""

from __future__ import annotations

from argparse import _ActionsContainer
from functools import partial
from typing import Any

import torch

from benchmarks import graphs
from benchmarks.arguments import add_list, sizes, some_of
from benchmarks.operations import Operation, by_columns, workload

MATRICES = "cora,pubmed,arxiv,wordnet,mesh,poisson300"


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--matrices", some_of(*graphs.ENTRIES), MATRICES, "which")
    add_list(parser, "--columns", sizes, "1,16,64,100,256", "of X")


def exact(a: Any, x: Any) -> Any:
    return a @ x


def build(name: str, columns: int) -> Operation:
    a = graphs.matrix(name)
    x = torch.randn(a.shape[1], columns, generator=torch.Generator().manual_seed(0))
    return Operation("spmm", a, (x,), exact, 2 * a.nnz * columns, 4 * columns * sum(a.shape))


WORKLOAD = workload(
    "spmm", "sparse matrix times a dense one", add_arguments, partial(by_columns, build), panels=("matrix",), across="columns"
)
