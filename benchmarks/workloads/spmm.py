"""SpMM: Y = A X, X with a few columns or many."""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from functools import partial
from typing import Any

import torch

from benchmarks import graphs
from benchmarks.arguments import add_list, counted, sizes, some_of
from benchmarks.operations import Operation, workload
from benchmarks.registry import Case

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


def cases(args: Namespace) -> list[Case]:
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


WORKLOAD = workload("spmm", "sparse matrix times a dense one", add_arguments, cases, panels=("matrix",), across="columns")
