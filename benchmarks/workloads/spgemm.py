"""SpGEMM: A Aᵀ, sparse as well. Not of the graphs whose hubs make it dense."""

from __future__ import annotations

from argparse import Namespace, _ActionsContainer
from functools import partial
from typing import Any

import numpy as np

from benchmarks import graphs
from benchmarks.arguments import add_list, some_of
from benchmarks.operations import Operation, workload
from benchmarks.registry import Case

MATRICES = "cora,pubmed,wordnet,mesh,dual,poisson300"


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--matrices", some_of(*graphs.ENTRIES), MATRICES, "which")


def exact(a: Any) -> Any:
    return a @ a.T.tocsr()


def build(name: str) -> Operation:
    a = graphs.matrix(name)
    return Operation("spgemm", a, (), exact, 2.0 * (np.bincount(a.indices).astype(float) ** 2).sum(), 0)


def cases(args: Namespace) -> list[Case]:
    return [Case(name, {"matrix": name}, partial(build, name), 4e-8 * graphs.ENTRIES[name]) for name in args.matrices]


WORKLOAD = workload("spgemm", "sparse matrix times its transpose", add_arguments, cases)
