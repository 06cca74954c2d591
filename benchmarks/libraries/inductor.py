"""TorchInductor on gather and scatter in plain PyTorch: message passing as it is written by hand, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations import Way, library, rows_of


def sums(rows: Tensor, columns: Tensor, weights: Tensor, x: Tensor, nodes: int) -> Tensor:
    """Of the rows that the columns name, weighted, at each row [nodes, ...]."""
    weighted = x.index_select(0, columns) * weights.view(-1, *[1] * (x.dim() - 1))
    return weighted.new_zeros(nodes, *x.shape[1:]).index_add(0, rows, weighted)


def products(rows: Tensor, columns: Tensor, weights: Tensor, nodes: int, x: Tensor, y: Tensor) -> Tensor:
    return (x.index_select(0, rows) * y.index_select(0, columns)).sum(-1)


def network(
    rows: Tensor, columns: Tensor, weights: Tensor, nodes: int, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    hidden = F.relu(sums(rows, columns, weights, x @ w1, nodes) + b1)
    return sums(rows, columns, weights, hidden @ w2, nodes) + b2


def attention(
    rows: Tensor, columns: Tensor, weights: Tensor, nodes: int, x: Tensor, w: Tensor, to: Tensor, source: Tensor
) -> Tensor:
    h = (x @ w).view(-1, *to.shape)
    scores = F.leaky_relu((h * to).sum(-1)[rows] + (h * source).sum(-1)[columns], 0.2)
    most = scores.new_full((nodes, len(to)), -torch.inf).scatter_reduce(0, rows[:, None].expand_as(scores), scores, "amax")
    shares = (scores - most[rows]).exp()
    total = shares.new_zeros(nodes, len(to)).index_add(0, rows, shares)
    messages = h[columns] * (shares / total[rows]).unsqueeze(-1)
    return messages.new_zeros(nodes, *to.shape).index_add(0, rows, messages).flatten(1)


def compiled(function: Callable[..., Tensor]) -> Way:
    def way(a: Any, *operands: Any) -> Callable[[], Tensor]:
        dense = [x if isinstance(x, Tensor) else torch.from_numpy(x.toarray()) for x in operands]
        edges = rows_of(a), torch.from_numpy(a.indices).long(), torch.from_numpy(a.data), a.shape[0]
        made = torch.compile(function)
        return lambda: made(*edges, *dense)

    return way


def propagated(rows: Tensor, columns: Tensor, weights: Tensor, nodes: int, x: Tensor) -> Tensor:
    return sums(rows, columns, weights, x, nodes)


WAYS = {
    "spmv": compiled(propagated),
    "spmm": compiled(propagated),
    "sddmm": compiled(products),
    "gcn": compiled(network),
    "gat": compiled(attention),
}

CONTENDER = library("Inductor, gather and scatter", WAYS)
