"""MKL's inspector-executor: handles optimised once for a kind of product, results in memory that is allocated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.mkl import MATRIX, NON_TRANSPOSED, ONE, ROW_MAJOR, ZERO, Handle, at, call, missing, start
from benchmarks.operations import library, torch_csr


def product(a: Any, columns: int) -> Callable[[Tensor], Tensor]:
    """A X for x [K, columns] or, with one column, [K]."""
    start()
    handle = Handle(torch_csr(a), columns, ROW_MAJOR)
    y = torch.empty(a.shape[0], columns)

    def vector(x: Tensor) -> Tensor:
        call("mkl_sparse_s_mv", NON_TRANSPOSED, ONE, handle.at, MATRIX, at(x), ZERO, at(y))
        return y.view(-1, *x.shape[1:])

    def matrix(x: Tensor) -> Tensor:
        sizes = at(x), columns, columns, ZERO, at(y), columns
        call("mkl_sparse_s_mm", NON_TRANSPOSED, ONE, handle.at, MATRIX, ROW_MAJOR, *sizes)
        return y

    return vector if columns == 1 else matrix


def spmm(a: Any, x: Tensor) -> Callable[[], Tensor]:
    multiply = product(a, x.shape[1] if x.dim() == 2 else 1)
    return lambda: multiply(x)


def gcn(a: Any, x: Any, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Callable[[], Tensor]:
    hidden, classes = w1.shape[1], w2.shape[1]
    first, second = product(a, hidden), product(a, classes)
    if isinstance(x, Tensor):
        result = torch.empty(len(x), hidden)
        embed = lambda: torch.mm(x, w1, out=result)
    else:
        multiply = product(x, hidden)
        embed = lambda: multiply(w1)
    reduced = torch.empty(a.shape[0], classes)
    return lambda: second(torch.mm(F.relu_(first(embed()).add_(b1)), w2, out=reduced)).add_(b2)


CONTENDER = library("MKL inspector-executor", {"spmv": spmm, "spmm": spmm, "gcn": gcn}, missing)
