"""SDDMM: X Yᵀ at the entries of a sparse matrix."""

from __future__ import annotations

from argparse import _ActionsContainer
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import graphs
from benchmarks.arguments import add_list, sizes, some_of
from benchmarks.operations import Operation, by_columns, rows_of, workload

MATRICES = "cora,pubmed,arxiv,wordnet,mesh,poisson300"
_AT_ONCE = 1 << 16  # entries


def add_arguments(parser: _ActionsContainer) -> None:
    add_list(parser, "--matrices", some_of(*graphs.ENTRIES), MATRICES, "which")
    add_list(parser, "--columns", sizes, "128", "of X and Y")


def exact(a: Any, x: Any, y: Any) -> Any:
    rows = rows_of(a).numpy()
    parts = [slice(start, start + _AT_ONCE) for start in range(0, a.nnz, _AT_ONCE)]
    return np.concatenate([np.einsum("ek,ek->e", x[rows[part]], y[a.indices[part]]) for part in parts])


def build(name: str, columns: int) -> Operation:
    a, generator = graphs.pattern(graphs.matrix(name)), torch.Generator().manual_seed(0)
    x, y = (torch.randn(nodes, columns, generator=generator) for nodes in a.shape)
    return Operation("sddmm", a, (x, y), exact, 2 * a.nnz * columns, 4 * (columns * sum(a.shape) + a.nnz))


WORKLOAD = workload("sddmm", "dense product at the entries of a sparse matrix", add_arguments, partial(by_columns, build))
