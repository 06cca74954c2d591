"""MKL's inspector-executor: every pruned Linear computed by `mkl_sparse_s_mm` on a handle that was optimised once.

It needs the package `mkl`, whose libraries lie in the environment's `lib`. Their OpenMP layer finds its functions in
PyTorch's libgomp, so both share one team of threads. Results go to memory that is allocated once.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.linears import with_sparse_linears
from benchmarks.registry import Contender, Prepared, Problem

# Of mkl_spblas.h
_NON_TRANSPOSED, _BASE_0, _GENERAL = 10, 0, 20
_ROW_MAJOR, _COLUMN_MAJOR = 101, 102
_CALLS = 1000

_ONE = ctypes.c_float(1.0)


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


def accepted(status: int) -> None:
    if status:
        raise RuntimeError(f"MKL refuses with status {status}")


class MklLinear(nn.Module):
    """y = x Wᵀ + b with W an optimised handle; x is [..., in_features], contiguous results.

    At the first call it tries whether it is faster to read and write torch's layout as column-major matrices, or to
    transpose before and after.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        csr = linear.weight.detach().to_sparse_csr()
        self.m, self.k = linear.weight.shape
        self.arrays = csr.crow_indices().int(), csr.col_indices().int(), csr.values().clone()
        self.bias = linear.bias.detach() if linear.bias is not None else torch.zeros(self.m)
        self.handle = ctypes.c_void_p()
        self.product: Callable[[Tensor], Tensor] | None = None
        start, column, value = (array.data_ptr() for array in self.arrays)
        accepted(
            mkl().mkl_sparse_s_create_csr(
                ctypes.byref(self.handle), _BASE_0, self.m, self.k, *map(ctypes.c_void_p, (start, start + 4, column, value))
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.k).contiguous()
        if self.product is None:
            self.product = self.fastest(rows)
        return self.product(rows).view(*x.shape[:-1], self.m)

    def fastest(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        """The faster way for so many rows, in memory of its own."""
        tokens = len(rows)
        out, transposed = torch.empty(tokens, self.m), torch.empty(self.m, tokens)
        for layout in (_ROW_MAJOR, _COLUMN_MAJOR):
            accepted(mkl().mkl_sparse_set_mm_hint(self.handle, _NON_TRANSPOSED, _MATRIX, layout, tokens, _CALLS))
        accepted(mkl().mkl_sparse_set_mv_hint(self.handle, _NON_TRANSPOSED, _MATRIX, _CALLS))
        accepted(mkl().mkl_sparse_optimize(self.handle))

        def vector(x: Tensor) -> Tensor:
            out[0].copy_(self.bias)
            pointers = ctypes.c_void_p(x.data_ptr()), _ONE, ctypes.c_void_p(out.data_ptr())
            accepted(mkl().mkl_sparse_s_mv(_NON_TRANSPOSED, _ONE, self.handle, _MATRIX, *pointers))
            return out

        def as_columns(x: Tensor) -> Tensor:
            out.copy_(self.bias.expand(tokens, self.m))
            self.matrix(_COLUMN_MAJOR, x, self.k, out, self.m, tokens)
            return out

        def with_transposes(x: Tensor) -> Tensor:
            transposed.copy_(self.bias[:, None].expand(self.m, tokens))
            self.matrix(_ROW_MAJOR, x.t().contiguous(), tokens, transposed, tokens, tokens)
            return out.copy_(transposed.t())

        def seconds(way: Callable[[Tensor], Tensor]) -> float:
            way(rows)
            start = time.perf_counter()
            way(rows)
            way(rows)
            return time.perf_counter() - start

        return vector if tokens == 1 else min((as_columns, with_transposes), key=seconds)

    def matrix(self, layout: int, x: Tensor, ldx: int, out: Tensor, ldo: int, tokens: int) -> None:
        """out += W x"""
        x_at, out_at = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        accepted(
            mkl().mkl_sparse_s_mm(_NON_TRANSPOSED, _ONE, self.handle, _MATRIX, layout, x_at, tokens, ldx, _ONE, out_at, ldo)
        )

    def __del__(self) -> None:
        mkl().mkl_sparse_destroy(self.handle)


def prepare(problem: Problem) -> Prepared:
    mkl().MKL_Set_Num_Threads(torch.get_num_threads())
    model = with_sparse_linears(problem, MklLinear)
    return Prepared(lambda: model(*problem.inputs))


CONTENDER = Contender("MKL inspector-executor", prepare, missing=missing)
