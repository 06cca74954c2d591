"""PyTorch Geometric's layers compiled by TorchInductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.libraries.pyg import Gcn, edges, gat_layer, missing
from benchmarks.operations import library


def gcn(a: Any, x: Any, *parameters: Tensor) -> Callable[[], Tensor]:
    model, edge_index, weights = torch.compile(Gcn(*parameters).eval()), edges(a), torch.from_numpy(a.data)
    features = x if isinstance(x, Tensor) else torch.from_numpy(x.toarray())
    return lambda: model(features, edge_index, weights)


def gat(a: Any, x: Tensor, *parameters: Tensor) -> Callable[[], Tensor]:
    layer, edge_index = torch.compile(gat_layer(*parameters)), edges(a)
    return lambda: layer(x, edge_index)


CONTENDER = library("PyTorch Geometric, Inductor", {"gcn": gcn, "gat": gat}, missing)
