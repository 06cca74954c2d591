"""SparseGPT (Frantar and Alistarh, 2023): prunes columns from left to right; the columns to the right compensate for it.

With C the upper Cholesky factor of H^-1 (its row i is that of the inverse of H without the columns before i, scaled):

    score of w_i     w_i^2 / C_ii^2                      for a block of columns at once (algorithm 1, line 7)
    w_i dropped      w_j -= w_i / C_ii C_ij   for j > i  the least-squares update of the later columns
"""

import torch
from torch import Tensor

from gossamer.sparsity.pruning.layer_problem import LayerProblem
from gossamer.sparsity.pruning.patterns import Pattern, mask_of

_COLUMNS = 64


def sparsegpt(problem: LayerProblem, pattern: Pattern, density: float, columns: int = _COLUMNS) -> Tensor:
    """Returns the pruned weight. Masks are chosen for one block of `columns` at a time, each with the same density."""
    weight = problem.target.clone()
    step = max(columns // pattern.columns, 1) * pattern.columns
    factor = problem.curvature.inverse_factor
    for start in range(0, weight.shape[-1], step):
        stop = min(start + step, weight.shape[-1])
        block, own = weight[..., start:stop], factor[..., start:stop, start:stop]
        pivots = own.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        mask = mask_of(pattern, block.square() / pivots.square(), density)
        errors = torch.zeros_like(block)
        for i in range(stop - start):
            errors[..., i] = torch.where(mask[..., i], 0, block[..., i] / pivots[..., i])
            block[..., i:] -= errors[..., i, None] * own[..., None, i, i:]
        block *= mask  # dropped elements are 0 except for rounding
        weight[..., stop:] -= errors @ factor[..., start:stop, stop:]
    return weight
