"""SpMV: y = A x."""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from functools import partial

import torch

from benchmarks import graphs
from benchmarks.arguments import add_list, some_of
from benchmarks.operations import Operation, workload
from benchmarks.registry import Case
from benchmarks.workloads.spmm import exact

MATRICES = "pubmed,arxiv,wordnet,mesh,dual,poisson300"


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--matrices", some_of(*graphs.ENTRIES), MATRICES, "which")


def build(name: str) -> Operation:
    a = graphs.matrix(name)
    x = torch.randn(a.shape[1], generator=torch.Generator().manual_seed(0))
    return Operation("spmv", a, (x,), exact, 2 * a.nnz, 4 * sum(a.shape))


def cases(args: Namespace) -> list[Case]:
    return [Case(name, {"matrix": name}, partial(build, name), 2e-9 * graphs.ENTRIES[name]) for name in args.matrices]


WORKLOAD = workload("spmv", "sparse matrix times a vector", add_arguments, cases)
