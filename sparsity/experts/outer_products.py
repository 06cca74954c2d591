"""Computes gradients of experts' weights: for each expert the sum of outer products of two rows of each slot."""

import torch
from torch import Tensor

from gossamer.runtime.experts.routes import Routes
from gossamer.sparsity.experts import kernels


def outer_products(left: Tensor, right: Tensor, routes: Routes, tops: tuple[int, int]) -> Tensor:
    """Returns [experts, rows, columns] for left [any, rows] and right [any, columns]; zeros for an expert without a slot.

    tops  how many slots share a row of left, and of right; 0 if rows are in the order of the routes
    """
    if kernels.multiplies(left, right):
        return kernels.outer(left, right, routes, tops)
    out = left.new_zeros((len(routes.positions) - 1, left.shape[1], right.shape[1]))
    for expert, begin, end in routes.hit():
        rows = [_rows(each, routes, top, begin, end) for each, top in zip((left, right), tops, strict=True)]
        torch.mm(rows[0].mT, rows[1], out=out[expert])
    return out


def _rows(x: Tensor, routes: Routes, top: int, begin: int, end: int) -> Tensor:
    return x.index_select(0, routes.order[begin:end] // top) if top else x[begin:end]
