"""Gossamer on PyTorch Geometric's layers and edge lists as they are: `torch.compile(model, backend="sparse")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import sparse
from benchmarks.libraries import pyg
from benchmarks.libraries.pyg import Gcn, edges, gat_layer
from benchmarks.operations import library


def missing() -> str | None:
    return sparse.missing() or pyg.missing()


def gcn(a: Any, x: Any, *parameters: Tensor) -> Callable[[], Tensor]:
    model = torch.compile(Gcn(*parameters).eval(), backend="sparse", fullgraph=True)
    edge_index, weights = edges(a), torch.from_numpy(a.data)
    features = x if isinstance(x, Tensor) else torch.from_numpy(x.toarray())
    return lambda: model(features, edge_index, weights)


def gat(a: Any, x: Tensor, *parameters: Tensor) -> Callable[[], Tensor]:
    layer, edge_index = torch.compile(gat_layer(*parameters), backend="sparse", fullgraph=True), edges(a)
    return lambda: layer(x, edge_index)


CONTENDER = library("Gossamer, PyTorch Geometric", {"gcn": gcn, "gat": gat}, missing)
