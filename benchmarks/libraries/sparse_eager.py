"""Gossamer's SparseTensor in eager mode, CSR with 32-bit indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.sparse import missing
from benchmarks.operations import Way, library
from benchmarks.workloads.search import BEST

if TYPE_CHECKING:
    from gossamer import SparseTensor


def product(a: SparseTensor, x: Tensor) -> Tensor:
    return a @ x


def sddmm(a: SparseTensor, x: Tensor, y: Tensor) -> Tensor:
    import gossamer

    return gossamer.einsum("ij,ik,jk->ij", a, x, y).values()


def spgemm(a: SparseTensor) -> Tensor:
    return a @ a.t()


def gcn(a: SparseTensor, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return a @ (F.relu(a @ (x @ w1) + b1) @ w2) + b2


def search(a: SparseTensor, queries: Tensor) -> Tensor:
    """Sparse queries multiply an index, which has the documents of each word. The scores are dense in both cases."""
    if type(queries) is Tensor:
        return (a @ queries.t()).t().topk(BEST).values
    import gossamer

    return gossamer.einsum("qw,wd->qd", queries, a, format="dense").topk(BEST).values


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"spmv": product, "spmm": product, "sddmm": sddmm, "spgemm": spgemm, "gcn": gcn}


def indexed(a: Any, queries: Any) -> Callable[[], Tensor]:
    index, asked = ours(a if isinstance(queries, Tensor) else a.T.tocsr(), queries)
    return lambda: search(cast("SparseTensor", index), asked)


def ours(a: Any, *operands: Any) -> list[Tensor]:
    """The operands with SparseTensors for what is sparse."""
    from gossamer import SparseTensor

    return [x if isinstance(x, Tensor) else SparseTensor.from_scipy(x) for x in (a, *operands)]


def eager(function: Callable[..., Tensor]) -> Way:
    def way(*given: Any) -> Callable[[], Tensor]:
        operands = ours(*given)
        return lambda: function(*operands)

    return way


CONTENDER = library(
    "Gossamer, eager", {name: eager(function) for name, function in FUNCTIONS.items()} | {"search": indexed}, missing
)
