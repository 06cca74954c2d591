"""`torch.sparse` COO, coalesced, with the 64-bit indices that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations import library, rows_of


def coo(a: Any) -> Tensor:
    indices = torch.stack([rows_of(a), torch.from_numpy(a.indices).long()])
    return torch.sparse_coo_tensor(indices, torch.from_numpy(a.data), a.shape, check_invariants=False, is_coalesced=True)


def product(a: Any, x: Tensor) -> Callable[[], Tensor]:
    matrix = coo(a)
    return lambda: matrix @ x


def spgemm(a: Any) -> Callable[[], Tensor]:
    matrix, transposed = coo(a), coo(a).t().coalesce()
    return lambda: torch.sparse.mm(matrix, transposed)


def gcn(a: Any, x: Any, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Callable[[], Tensor]:
    matrix, features = coo(a), x if isinstance(x, Tensor) else coo(x)
    return lambda: matrix @ (F.relu(matrix @ (features @ w1) + b1) @ w2) + b2


CONTENDER = library("torch.sparse COO", {"spmv": product, "spmm": product, "spgemm": spgemm, "gcn": gcn})
