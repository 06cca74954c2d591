"""MKL's product of sparse matrices, through `sparse_dot_mkl`: from SciPy's arrays to new ones of SciPy."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import mkl
from benchmarks.operations import library


def missing() -> str | None:
    return mkl.missing() or (None if find_spec("sparse_dot_mkl") else "not installed: pip install sparse_dot_mkl")


def spgemm(a: Any) -> Callable[[], Any]:
    mkl.start()
    os.environ["MKL_RT"] = str(mkl.library())
    import sparse_dot_mkl

    sparse_dot_mkl.mkl_set_num_threads(torch.get_num_threads())
    transposed = a.T.tocsr()
    return lambda: sparse_dot_mkl.dot_product_mkl(a, transposed)


CONTENDER = library("MKL, sparse_dot_mkl", {"spgemm": spgemm}, missing)
