"""MKL's inspector-executor: every pruned Linear computed by `mkl_sparse_s_mm` on a handle that was optimised once.

It needs the package `mkl`, whose libraries lie in the environment's `lib`. Their OpenMP layer finds its functions in
PyTorch's libgomp, so both share one team of threads. Results go to memory that is allocated once.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.linears import with_sparse_linears
from benchmarks.registry import Contender, Prepared, Problem, Unsupported

# Of mkl_spblas.h
_NON_TRANSPOSED, _BASE_0, _GENERAL = 10, 0, 20
_ROW_MAJOR, _COLUMN_MAJOR = 101, 102
_CALLS = 1000

_OF_PYTORCH = "aoti_torch_dtype_float32"  # a function that libtorch_cpu alone has

_ONE = ctypes.c_float(1.0)

Product = Callable[[Tensor], Tensor]


class _Description(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("mode", ctypes.c_int), ("diagonal", ctypes.c_int)]


_MATRIX = _Description(_GENERAL, 0, 0)


def library() -> Path | None:
    return next(iter(sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so.*"))), None)


def missing() -> str | None:
    return None if library() else "MKL's libraries are not installed: pip install mkl"


@cache
def mkl() -> ctypes.CDLL:
    os.environ.setdefault("MKL_THREADING_LAYER", "GNU")
    return ctypes.CDLL(str(library()), mode=ctypes.RTLD_LOCAL)


def call(function: str, *arguments: object) -> None:
    status = getattr(mkl(), function)(*arguments)
    if status:
        raise RuntimeError(f"{function} returns {status}")


def at(tensor: Tensor, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() + offset)


class Handle:
    """A CSR matrix that MKL has optimised for one kind of product: with a layout of x of so many rows, or with a vector."""

    def __init__(self, weight: Tensor, tokens: int, layout: int) -> None:
        self.start, self.column = weight.crow_indices().int(), weight.col_indices().int()
        self.value = weight.values().clone()
        self.at = ctypes.c_void_p()
        self.m, self.k = weight.shape
        arrays = at(self.start), at(self.start, self.start.element_size()), at(self.column), at(self.value)
        call("mkl_sparse_s_create_csr", ctypes.byref(self.at), _BASE_0, self.m, self.k, *arrays)
        if tokens == 1:
            call("mkl_sparse_set_mv_hint", self.at, _NON_TRANSPOSED, _MATRIX, _CALLS)
        else:
            call("mkl_sparse_set_mm_hint", self.at, _NON_TRANSPOSED, _MATRIX, layout, tokens, _CALLS)
        call("mkl_sparse_optimize", self.at)

    def __del__(self) -> None:
        call("mkl_sparse_destroy", self.at)


def vector(weight: Tensor, bias: Tensor) -> Product:
    """y = W x + b for x [1, K]."""
    handle, y = Handle(weight, 1, _ROW_MAJOR), torch.empty(1, len(bias))

    def product(x: Tensor) -> Tensor:
        y[0].copy_(bias)
        call("mkl_sparse_s_mv", _NON_TRANSPOSED, _ONE, handle.at, _MATRIX, at(x), _ONE, at(y))
        return y

    return product


def as_columns(weight: Tensor, bias: Tensor, tokens: int) -> Product:
    """x [T, K] and y [T, M] taken as the column-major matrices that they are to MKL."""
    handle, y = Handle(weight, tokens, _COLUMN_MAJOR), torch.empty(tokens, len(bias))

    def product(x: Tensor) -> Tensor:
        y.copy_(bias.expand_as(y))
        sizes = at(x), tokens, handle.k, _ONE, at(y), handle.m
        call("mkl_sparse_s_mm", _NON_TRANSPOSED, _ONE, handle.at, _MATRIX, _COLUMN_MAJOR, *sizes)
        return y

    return product


def with_transposes(weight: Tensor, bias: Tensor, tokens: int) -> Product:
    """x and y transposed before and after, to row-major matrices with a token a column."""
    handle, y, across = Handle(weight, tokens, _ROW_MAJOR), torch.empty(tokens, len(bias)), torch.empty(len(bias), tokens)

    def product(x: Tensor) -> Tensor:
        across.copy_(bias[:, None].expand_as(across))
        columns = x.t().contiguous()
        sizes = at(columns), tokens, tokens, _ONE, at(across), tokens
        call("mkl_sparse_s_mm", _NON_TRANSPOSED, _ONE, handle.at, _MATRIX, _ROW_MAJOR, *sizes)
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


def mixed_up() -> bool:
    """Whether PyTorch's symbols are visible to all libraries: MKL's then reach the MKL inside PyTorch, and crash."""
    return hasattr(ctypes.CDLL(None), _OF_PYTORCH)


def prepare(problem: Problem) -> Prepared:
    if mixed_up():
        raise Unsupported("something has loaded PyTorch's libraries with RTLD_GLOBAL, and MKL cannot be loaded beside them")
    mkl().MKL_Set_Num_Threads(torch.get_num_threads())
    model = with_sparse_linears(problem, MklLinear)
    return Prepared(lambda: model(*problem.inputs))


CONTENDER = Contender("MKL inspector-executor", prepare, missing=missing)
