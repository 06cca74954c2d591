"""PyTorch Geometric with an edge list: its layers as a user gets them, without extensions of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.operations import library, rows_of


def missing() -> str | None:
    return None if find_spec("torch_geometric") else "PyTorch Geometric is not installed: pip install torch_geometric"


def edges(a: Any) -> Tensor:
    """[2, edges], sources first."""
    return torch.stack([torch.from_numpy(a.indices).long(), rows_of(a)])


class Gcn(nn.Module):
    """Two layers GCNConv that take the normalised weights of the edges."""

    def __init__(self, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        layers = [GCNConv(*w.shape, normalize=False) for w in (w1, w2)]
        for layer, w, b in zip(layers, (w1, w2), (b1, b2), strict=True):
            layer.lin.weight.data, layer.bias.data = w.t().contiguous(), b
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor, weights: Tensor) -> Tensor:
        first, second = self.layers
        found: Tensor = second(F.relu(first(x, edge_index, weights)), edge_index, weights)
        return found


def gat_layer(w: Tensor, to: Tensor, source: Tensor) -> nn.Module:
    """GATConv without the loops and the bias, which the operation's matrix and result do without."""
    from torch_geometric.nn import GATConv

    layer = GATConv(w.shape[0], to.shape[1], len(to), add_self_loops=False, bias=False)
    layer.lin.weight.data = w.t().contiguous()
    layer.att_dst.data, layer.att_src.data = to[None], source[None]
    return layer.eval()


def gcn(a: Any, x: Any, *parameters: Tensor) -> Callable[[], Tensor]:
    model, edge_index, weights = Gcn(*parameters).eval(), edges(a), torch.from_numpy(a.data)
    features = x if isinstance(x, Tensor) else torch.from_numpy(x.toarray())
    return lambda: model(features, edge_index, weights)


def gat(a: Any, x: Tensor, *parameters: Tensor) -> Callable[[], Tensor]:
    layer, edge_index = gat_layer(*parameters), edges(a)
    return lambda: layer(x, edge_index)


CONTENDER = library("PyTorch Geometric", {"gcn": gcn, "gat": gat}, missing)
