"""Gossamer: functions of SparseTensors, and PyTorch Geometric's GATConv, by `torch.compile(f, backend="sparse")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders.sparse import missing
from benchmarks.libraries.sparse_eager import FUNCTIONS, ours
from benchmarks.libraries.sparse_pyg import gat
from benchmarks.operations import Way, library


def compiled(function: Callable[..., Tensor]) -> Way:
    def way(*given: Any) -> Callable[[], Tensor]:
        operands = ours(*given)
        made = torch.compile(function, backend="sparse", fullgraph=True)
        return lambda: made(*operands)

    return way


CONTENDER = library("Gossamer", {name: compiled(function) for name, function in FUNCTIONS.items()} | {"gat": gat}, missing)
