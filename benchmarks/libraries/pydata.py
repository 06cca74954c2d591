"""PyData's `sparse`: GCXS compressed by rows, kernels by Numba, on one thread."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from benchmarks.operations import library


def missing() -> str | None:
    return None if find_spec("sparse") else "PyData's sparse is not installed: pip install sparse"


def gcxs(a: Any) -> Any:
    import sparse

    return sparse.GCXS.from_scipy_sparse(a)


def product(a: Any, x: Tensor) -> Callable[[], Any]:
    matrix, dense = gcxs(a), x.numpy()
    return lambda: matrix @ dense


def spgemm(a: Any) -> Callable[[], Any]:
    matrix, transposed = gcxs(a), gcxs(a.T.tocsr())
    return lambda: matrix @ transposed


CONTENDER = library("PyData sparse", {"spmv": product, "spmm": product, "spgemm": spgemm}, missing)
