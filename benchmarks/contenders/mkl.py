"""MKL's inspector-executor: every pruned Linear computed by `mkl_sparse_s_mm` on a handle that was optimised once.

Results go to memory that is allocated once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.mkl import COLUMN_MAJOR, MATRIX, NON_TRANSPOSED, ONE, ROW_MAJOR, Handle, at, call, missing, start
from benchmarks.models import PrunedModel, with_sparse_linears
from benchmarks.registry import Contender, Prepared

Product = Callable[[Tensor], Tensor]


def vector(weight: Tensor, bias: Tensor) -> Product:
    """y = W x + b for x [1, K]."""
    handle, y = Handle(weight, 1, ROW_MAJOR), torch.empty(1, len(bias))

    def product(x: Tensor) -> Tensor:
        y[0].copy_(bias)
        call("mkl_sparse_s_mv", NON_TRANSPOSED, ONE, handle.at, MATRIX, at(x), ONE, at(y))
        return y

    return product


def as_columns(weight: Tensor, bias: Tensor, tokens: int) -> Product:
    """x [T, K] and y [T, M] taken as the column-major matrices that they are to MKL."""
    handle, y = Handle(weight, tokens, COLUMN_MAJOR), torch.empty(tokens, len(bias))

    def product(x: Tensor) -> Tensor:
        y.copy_(bias.expand_as(y))
        sizes = at(x), tokens, handle.k, ONE, at(y), handle.m
        call("mkl_sparse_s_mm", NON_TRANSPOSED, ONE, handle.at, MATRIX, COLUMN_MAJOR, *sizes)
        return y

    return product


def with_transposes(weight: Tensor, bias: Tensor, tokens: int) -> Product:
    """x and y transposed before and after, to row-major matrices with a token a column."""
    handle, y, across = Handle(weight, tokens, ROW_MAJOR), torch.empty(tokens, len(bias)), torch.empty(len(bias), tokens)

    def product(x: Tensor) -> Tensor:
        across.copy_(bias[:, None].expand_as(across))
        columns = x.t().contiguous()
        sizes = at(columns), tokens, tokens, ONE, at(across), tokens
        call("mkl_sparse_s_mm", NON_TRANSPOSED, ONE, handle.at, MATRIX, ROW_MAJOR, *sizes)
        return y.copy_(across.t())

    return product


def seconds(product: Product, x: Tensor) -> float:
    product(x)
    start = time.perf_counter()
    product(x)
    product(x)
    return time.perf_counter() - start


def csr(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return weight.detach().to_sparse_csr()


class MklLinear(nn.Module):
    """y = x Wᵀ + b with W in handles of MKL; x is [..., in_features], contiguous results.

    The first call, whose number of rows all others have, chooses the faster way.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = csr(linear.weight)
        self.bias = linear.bias.detach() if linear.bias is not None else torch.zeros(linear.out_features)
        self.product: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self.product is None:
            if len(rows) == 1:
                self.product = vector(self.weight, self.bias)
            else:
                ways = [way(self.weight, self.bias, len(rows)) for way in (as_columns, with_transposes)]
                self.product = min(ways, key=lambda way: seconds(way, rows))
        return self.product(rows).view(*x.shape[:-1], -1)


def prepare(problem: PrunedModel) -> Prepared:
    start()
    model = with_sparse_linears(problem, MklLinear)
    return Prepared(lambda: model(*problem.inputs))


CONTENDER = Contender("MKL inspector-executor", prepare, missing=missing)
