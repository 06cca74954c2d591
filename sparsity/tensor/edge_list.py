"""Converts edge lists to coordinates of an adjacency. An operation checks bounds, so that compiled graphs check them, too:

gossamer::in_bounds(nodes, extent, name)        returns the nodes; FormatError if one of them is not in [0, extent)
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gossamer.dialects.errors import FormatError
from gossamer.runtime.operations import Operation
from gossamer.sparsity.operations.open_sizes import agree
from gossamer.sparsity.operations.sparse_results import sizes_stay_inside


def edges(
    edge_index: Tensor, weight: Tensor | None, size: int | tuple[int, int] | None
) -> tuple[list[Tensor], Tensor, tuple[int, int]]:
    """Returns the coordinates [targets, sources], weights and shape of the adjacency of an edge list, after checks."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.is_floating_point():
        raise FormatError(f"edge_index must be integers [2, edges], got {edge_index.dtype} {list(edge_index.shape)}")
    edge_index = edge_index.long()
    source, target = edge_index.unbind(0)
    if weight is None:
        weight = torch.ones(source.shape[0], device=edge_index.device)
    if weight.dim() != 1 or not agree(weight.shape[0], source.shape[0]):
        raise FormatError(f"weight must be [{source.shape[0]}], one an edge, got {list(weight.shape)}")
    if size is not None and not _is_size(size):
        raise FormatError(f"size must be a number of nodes, or (targets, sources), got {size!r}")
    if size is None:
        with sizes_stay_inside():
            size = cast(int, torch.cat([edge_index.flatten(), edge_index.new_full((1,), -1)]).max().item()) + 1
    assert size is not None
    rows, columns = size if isinstance(size, Sequence) else (size, size)
    return [_in_bounds(target, rows, "target"), _in_bounds(source, columns, "source")], weight, (rows, columns)


def _is_size(size: object) -> bool:
    whole = int | np.integer | torch.SymInt
    return isinstance(size, whole) or (
        isinstance(size, Sequence) and len(size) == 2 and all(isinstance(n, whole) for n in size)
    )


def _check(nodes: Tensor, extent: int, name: str) -> None:
    if nodes.numel() and not 0 <= int(nodes.min()) <= int(nodes.max()) < extent:
        at = int(((nodes < 0) | (nodes >= extent)).nonzero()[0])
        node = int(nodes[at])
        instead = "pass a larger size" if node >= extent else "leave out the edges that -1 fills up, or number nodes from 0"
        raise FormatError(f"{name} of edge {at} is node {node}, must be in [0, {extent}): {instead}")


def _checked(nodes: Tensor, extent: int, name: str) -> Tensor:
    _check(nodes, extent, name)
    return nodes.clone()


def _fake(nodes: Tensor, extent: int, name: str) -> Tensor:
    return nodes.new_empty(nodes.shape)


_in_bounds = Operation("in_bounds(Tensor nodes, SymInt extent, str name) -> Tensor", _checked, _checked, _fake).register()
