"""`torch.sparse` CSR with 32-bit indices, called as a user calls it: results in fresh memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations import Way, library, rows_of, torch_csr
from benchmarks.workloads.search import BEST

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")


def product(a: Any, x: Tensor) -> Callable[[], Tensor]:
    matrix = torch_csr(a)
    return lambda: matrix @ x


def sddmm(a: Any, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    pattern, columns = torch_csr(a), y.t()
    return lambda: torch.sparse.sampled_addmm(pattern, x, columns, beta=0.0).values()


def spgemm(a: Any) -> Callable[[], Tensor]:
    matrix, transposed = torch_csr(a), torch_csr(a.T.tocsr())
    return lambda: matrix @ transposed


def gcn(a: Any, x: Any, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Callable[[], Tensor]:
    matrix, features = torch_csr(a), x if isinstance(x, Tensor) else torch_csr(x)
    return lambda: matrix @ (F.relu(matrix @ (features @ w1) + b1) @ w2) + b2


def gat(a: Any, x: Tensor, w: Tensor, to: Tensor, source: Tensor) -> Callable[[], Tensor]:
    """A matrix a head; the sums of the softmax divide the products, not the entries."""
    heads, width = to.shape
    starts, columns = torch.from_numpy(a.indptr), torch.from_numpy(a.indices)
    rows, lengths = rows_of(a), torch.from_numpy(a.indptr).diff().long()
    ones = torch.ones(a.shape[1], 1)

    def call() -> Tensor:
        h = (x @ w).view(-1, heads, width)
        scores = F.leaky_relu((h * to).sum(-1)[rows] + (h * source).sum(-1)[columns], 0.2)
        most = torch.segment_reduce(scores, "max", lengths=lengths, axis=0, unsafe=True)
        weights = (scores - most[rows]).exp().t().contiguous()
        found = []
        for head in range(heads):
            matrix = torch.sparse_csr_tensor(starts, columns, weights[head], a.shape, check_invariants=False)
            product = matrix @ torch.cat([h[:, head], ones], 1)
            found.append(product[:, :-1] / product[:, -1:])
        return torch.cat(found, 1)

    return call


def search(a: Any, queries: Any) -> Callable[[], Tensor]:
    """Sparse queries multiply an index, which has the documents of each word."""
    if isinstance(queries, Tensor):
        matrix, turned = torch_csr(a), queries.t().contiguous()
        return lambda: (matrix @ turned).t().topk(BEST).values
    index, given = torch_csr(a.T.tocsr()), torch_csr(queries)
    return lambda: (given @ index).to_dense().topk(BEST).values


WAYS: dict[str, Way] = {
    "spmv": product,
    "spmm": product,
    "sddmm": sddmm,
    "spgemm": spgemm,
    "gcn": gcn,
    "gat": gat,
    "search": search,
}

CONTENDER = library("torch.sparse CSR", WAYS)
