"""SciPy's csr_array, on one thread whatever the number allowed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.operations import library
from benchmarks.workloads.search import BEST


def missing() -> str | None:
    return None if find_spec("scipy") else "SciPy is not installed: pip install scipy"


def product(a: Any, x: Tensor) -> Callable[[], Any]:
    dense = x.numpy()
    return lambda: a @ dense


def spgemm(a: Any) -> Callable[[], Any]:
    transposed = a.T.tocsr()
    return lambda: a @ transposed


def gcn(a: Any, x: Any, *parameters: Tensor) -> Callable[[], Any]:
    w1, b1, w2, b2 = (parameter.numpy() for parameter in parameters)
    features = x.numpy() if isinstance(x, Tensor) else x
    return lambda: a @ (np.maximum(a @ (features @ w1) + b1, 0) @ w2) + b2


def search(a: Any, queries: Any) -> Callable[[], Any]:
    """Sparse queries multiply an index, which has the documents of each word."""
    index, turned = (a, queries.t().numpy()) if isinstance(queries, Tensor) else (a.T.tocsr(), queries)

    def call() -> Any:
        rows = (index @ turned).T if isinstance(turned, np.ndarray) else (turned @ index).toarray()
        best = np.argpartition(rows, -BEST, axis=1)[:, -BEST:]
        return -np.sort(-np.take_along_axis(rows, best, 1), axis=1)

    return call


CONTENDER = library("SciPy", {"spmv": product, "spmm": product, "spgemm": spgemm, "gcn": gcn, "search": search}, missing)
