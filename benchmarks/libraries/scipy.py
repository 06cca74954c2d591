"""SciPy's csr_array, on one thread whatever the number allowed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.operations import library


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


CONTENDER = library("SciPy", {"spmv": product, "spmm": product, "spgemm": spgemm, "gcn": gcn}, missing)
