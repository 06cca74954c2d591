"""MKL's inspector-executor by its C interface: handles on CSR matrices that MKL has optimised once.

It needs the package `mkl`, whose libraries lie in the environment's `lib`. Their OpenMP layer finds its functions in
PyTorch's libgomp, so both share one team of threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.registry import Unsupported

# Of mkl_spblas.h
NON_TRANSPOSED, _BASE_0, _GENERAL = 10, 0, 20
ROW_MAJOR, COLUMN_MAJOR = 101, 102
_CALLS = 1000

_OF_PYTORCH = "aoti_torch_dtype_float32"  # a function that libtorch_cpu alone has

ONE, ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class _Description(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("mode", ctypes.c_int), ("diagonal", ctypes.c_int)]


MATRIX = _Description(_GENERAL, 0, 0)


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
            call("mkl_sparse_set_mv_hint", self.at, NON_TRANSPOSED, MATRIX, _CALLS)
        else:
            call("mkl_sparse_set_mm_hint", self.at, NON_TRANSPOSED, MATRIX, layout, tokens, _CALLS)
        call("mkl_sparse_optimize", self.at)

    def __del__(self) -> None:
        call("mkl_sparse_destroy", self.at)


def mixed_up() -> bool:
    """Whether PyTorch's symbols are visible to all libraries: MKL's then reach the MKL inside PyTorch, and crash."""
    return hasattr(ctypes.CDLL(None), _OF_PYTORCH)


def start() -> None:
    """Loads MKL for as many threads as torch has now. Unsupported if it cannot live in this process."""
    if mixed_up():
        raise Unsupported("something has loaded PyTorch's libraries with RTLD_GLOBAL, and MKL cannot be loaded beside them")
    mkl().MKL_Set_Num_Threads(torch.get_num_threads())
